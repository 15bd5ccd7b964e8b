/*
 * What owner and connector are told of each other: by waiting, and by callbacks, in the order in
 * which it happened. Callbacks run on a thread of the library and may use the API themselves.
 */
#include "scenario.h"

#include <pthread.h>

enum { ID = 0x0e7e27, KEPT = 16 };

/* What a callback was called with. */
struct call {
    sci_segment_cb_reason_t reason;
    unsigned int node;
    unsigned int adapter;
    sci_error_t status;
};

struct calls {
    unsigned int count;
    struct call call[KEPT];
    const void *segment; /* the handle that it was called for, last */
    sci_callback_action_t answer;
};

static void note(struct calls *calls, const void *segment, struct call call)
{
    if (calls->count < KEPT)
        calls->call[calls->count] = call;
    calls->segment = segment;
    __atomic_add_fetch(&calls->count, 1, __ATOMIC_SEQ_CST);
}

static sci_callback_action_t on_local(void *arg, sci_local_segment_t segment,
                                      sci_segment_cb_reason_t reason, unsigned int node,
                                      unsigned int adapter, sci_error_t status)
{
    struct calls *calls = (struct calls *)arg;
    struct call call;
    sci_callback_action_t answer;
    CALLED();
    answer = calls->answer; /* before it is counted: then the scenario goes on */
    call.reason = reason;
    call.node = node;
    call.adapter = adapter;
    call.status = status;
    note(calls, (const void *)segment, call);
    return answer;
}

static sci_callback_action_t on_remote(void *arg, sci_remote_segment_t segment,
                                       sci_segment_cb_reason_t reason, sci_error_t status)
{
    struct calls *calls = (struct calls *)arg;
    struct call call;
    sci_callback_action_t answer;
    CALLED();
    answer = calls->answer; /* before it is counted: then the scenario goes on */
    call.reason = reason;
    call.node = call.adapter = 0;
    call.status = status;
    note(calls, (const void *)segment, call);
    return answer;
}

static void watch(struct calls *calls, sci_callback_action_t answer)
{
    calls->count = 0;
    calls->segment = NULL;
    calls->answer = answer;
}

static unsigned int count_of(struct calls *calls)
{
    return __atomic_load_n(&calls->count, __ATOMIC_SEQ_CST);
}

static sci_local_segment_t offer(struct scenario *scenario, sci_cb_local_segment_t callback,
                                 struct calls *calls, unsigned int flags)
{
    sci_local_segment_t segment;
    TRY(SCICreateSegment(scenario->sd, &segment, ID, 4096, callback, calls, flags, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    return segment;
}

static sci_remote_segment_t connect_to(struct scenario *scenario, sci_cb_remote_segment_t callback,
                                       struct calls *calls, unsigned int flags)
{
    sci_remote_segment_t segment;
    TRY(SCIConnectSegment(scenario->sd, &segment, scenario->peer, ID, 0, callback, calls, SOON, flags,
                          &error));
    return segment;
}

/* Without a callback, events are waited for. */
static void waited_for(struct scenario *scenario)
{
    unsigned int node = 0, adapter = 9;
    sci_segment_cb_reason_t reason;
    static struct calls unused;
    if (scenario->owner) {
        /* A callback without its flag is never called. */
        sci_local_segment_t segment = offer(scenario, on_local, &unused, 0);
        REFUSED(SCI_ERR_TIMEOUT,
                SCIWaitForLocalSegmentEvent(segment, &node, &adapter, 0, 0, &error));
        REFUSED(SCI_ERR_TIMEOUT,
                SCIWaitForLocalSegmentEvent(segment, &node, &adapter, 10, 0, &error));
        scenario_meet(scenario);
        TRY(reason = SCIWaitForLocalSegmentEvent(segment, &node, &adapter, SOON, 0, &error));
        CHECK(reason == SCI_CB_CONNECT && node == scenario->peer && adapter == 0);
        scenario_meet(scenario);
        TRY(reason = SCIWaitForLocalSegmentEvent(segment, &node, &adapter, SOON, 0, &error));
        CHECK(reason == SCI_CB_DISCONNECT && node == scenario->peer && adapter == 0);
        CHECK(count_of(&unused) == 0);
        TRY(SCIRemoveSegment(segment, 0, &error));
    } else {
        sci_remote_segment_t segment;
        sci_error_t status;
        scenario_meet(scenario);
        segment = connect_to(scenario, NULL, NULL, 0);
        REFUSED(SCI_ERR_TIMEOUT, SCIWaitForRemoteSegmentEvent(segment, &status, 0, 0, &error));
        scenario_meet(scenario);
        TRY(SCIDisconnectSegment(segment, 0, &error));
    }
    scenario_meet(scenario);
}

/* The owner hears of three connections, in order; a callback that cancels is not called again. */
static void local_callbacks(struct scenario *scenario)
{
    static struct calls calls;
    unsigned int i;
    if (scenario->owner) {
        sci_local_segment_t segment;
        watch(&calls, SCI_CALLBACK_CONTINUE);
        segment = offer(scenario, on_local, &calls, SCI_FLAG_USE_CALLBACK);
        /* What is told to a callback cannot be waited for as well. */
        REFUSED(SCI_ERR_ILLEGAL_OPERATION,
                SCIWaitForLocalSegmentEvent(segment, &i, &i, SCI_INFINITE_TIMEOUT, 0, &error));
        scenario_meet(scenario);
        AWAIT(count_of(&calls) >= 6);
        CHECK(count_of(&calls) == 6 && calls.segment == (const void *)segment);
        for (i = 0; i < 6; i++) {
            CHECK(calls.call[i].reason == (i % 2 == 0 ? SCI_CB_CONNECT : SCI_CB_DISCONNECT));
            CHECK(calls.call[i].node == scenario->peer && calls.call[i].adapter == 0);
            CHECK(calls.call[i].status == SCI_ERR_OK);
        }
        TRY(SCIRemoveSegment(segment, 0, &error));
        scenario_meet(scenario);

        watch(&calls, SCI_CALLBACK_CANCEL);
        segment = offer(scenario, on_local, &calls, SCI_FLAG_USE_CALLBACK);
        scenario_meet(scenario);
        scenario_meet(scenario); /* the peer came and left twice */
        AWAIT(count_of(&calls) > 0);
        TRY(SCIRemoveSegment(segment, 0, &error));
        CHECK(count_of(&calls) == 1 && calls.call[0].reason == SCI_CB_CONNECT);
    } else {
        scenario_meet(scenario);
        for (i = 0; i < 3; i++)
            TRY(SCIDisconnectSegment(connect_to(scenario, NULL, NULL, 0), 0, &error));
        scenario_meet(scenario);
        scenario_meet(scenario);
        for (i = 0; i < 2; i++)
            TRY(SCIDisconnectSegment(connect_to(scenario, NULL, NULL, 0), 0, &error));
        scenario_meet(scenario);
    }
    scenario_meet(scenario);
}

/* However the owner withdraws a segment, the connector is told to disconnect: nobody has died. */
static void withdrawn(struct scenario *scenario, unsigned int flags)
{
    static struct calls calls;
    if (scenario->owner) {
        sci_local_segment_t segment = offer(scenario, NULL, NULL, 0);
        scenario_meet(scenario);
        scenario_meet(scenario);
        if (flags == SCI_FLAG_FORCE_REMOVE)
            TRY(SCIRemoveSegment(segment, flags, &error));
        else
            TRY(SCISetSegmentUnavailable(segment, 0, flags, &error));
        scenario_meet(scenario);
        if (flags != SCI_FLAG_FORCE_REMOVE)
            TRY(SCIRemoveSegment(segment, 0, &error));
    } else {
        sci_remote_segment_t segment, waiting;
        sci_map_t map;
        volatile uint32_t *word;
        sci_segment_cb_reason_t reason;
        sci_error_t status;
        scenario_meet(scenario);
        watch(&calls, SCI_CALLBACK_CONTINUE);
        segment = connect_to(scenario, on_remote, &calls, SCI_FLAG_USE_CALLBACK);
        waiting = connect_to(scenario, NULL, NULL, 0);
        REFUSED(SCI_ERR_ILLEGAL_OPERATION,
                SCIWaitForRemoteSegmentEvent(segment, &status, SCI_INFINITE_TIMEOUT, 0, &error));
        TRY(word = (volatile uint32_t *)SCIMapRemoteSegment(segment, &map, 0, 4096, NULL, 0,
                                                            &error));
        scenario_meet(scenario);
        TRY(reason = SCIWaitForRemoteSegmentEvent(waiting, &status, SOON, 0, &error));
        CHECK(reason == SCI_CB_DISCONNECT);
        AWAIT(count_of(&calls) > 0);
        CHECK(calls.call[0].reason == SCI_CB_DISCONNECT && calls.segment == (const void *)segment);
        *word = 1; /* wherever it leads now */
        TRY(SCIUnmapSegment(map, 0, &error));
        TRY(SCIDisconnectSegment(segment, 0, &error));
        TRY(SCIDisconnectSegment(waiting, 0, &error));
        scenario_meet(scenario);
    }
    scenario_meet(scenario);
}

/* Connecting in the background: the callback says that it is done, or why it could not be. */
static void connected_in_the_background(struct scenario *scenario)
{
    static struct calls calls;
    unsigned int flags = SCI_FLAG_USE_CALLBACK | SCI_FLAG_ASYNCHRONOUS_CONNECT;
    sci_remote_segment_t segment;
    sci_map_t map;
    if (scenario->owner) {
        sci_local_segment_t own;
        scenario_meet(scenario); /* there is none yet */
        own = offer(scenario, NULL, NULL, 0);
        scenario_meet(scenario);
        scenario_meet(scenario);
        TRY(SCIRemoveSegment(own, 0, &error));
        return;
    }
    watch(&calls, SCI_CALLBACK_CONTINUE);
    TRY(SCIConnectSegment(scenario->sd, &segment, scenario->peer, ID, 0, on_remote, &calls, 0, flags,
                          &error));
    AWAIT(count_of(&calls) > 0);
    CHECK(calls.call[0].status == SCI_ERR_NO_SUCH_SEGMENT);
    REFUSED_SOMEHOW(SCIMapRemoteSegment(segment, &map, 0, 1, NULL, 0, &error));
    TRY(SCIDisconnectSegment(segment, 0, &error));
    scenario_meet(scenario);
    scenario_meet(scenario);
    watch(&calls, SCI_CALLBACK_CONTINUE);
    TRY(SCIConnectSegment(scenario->sd, &segment, scenario->peer, ID, 0, on_remote, &calls, SOON, flags,
                          &error));
    AWAIT(count_of(&calls) > 0);
    CHECK(calls.call[0].reason == SCI_CB_CONNECT && calls.call[0].status == SCI_ERR_OK);
    CHECK(calls.segment == (const void *)segment);
    TRY(SCIMapRemoteSegment(segment, &map, 0, 4096, NULL, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(segment, 0, &error));
    scenario_meet(scenario);
}

/* A callback that cancels when it is told that its connection is made is not called for its end. */
static void cancelled_when_connected(struct scenario *scenario)
{
    static struct calls calls;
    unsigned int flags = SCI_FLAG_USE_CALLBACK | SCI_FLAG_ASYNCHRONOUS_CONNECT, i;
    if (scenario->owner) {
        sci_local_segment_t own = offer(scenario, NULL, NULL, 0);
        scenario_meet(scenario);
        scenario_meet(scenario);
        TRY(SCIRemoveSegment(own, SCI_FLAG_FORCE_REMOVE, &error));
    } else {
        sci_remote_segment_t segment, other;
        sci_segment_cb_reason_t reason;
        sci_error_t status;
        scenario_meet(scenario);
        watch(&calls, SCI_CALLBACK_CANCEL);
        segment = connect_to(scenario, on_remote, &calls, flags);
        AWAIT(count_of(&calls) > 0);
        other = connect_to(scenario, NULL, NULL, 0);
        scenario_meet(scenario);
        TRY(reason = SCIWaitForRemoteSegmentEvent(other, &status, SOON, 0, &error));
        CHECK(reason == SCI_CB_DISCONNECT);
        for (i = 0; i < 300; i++) /* both are told at the same time, more or less */
            scenario_pause();
        TRY(SCIDisconnectSegment(segment, 0, &error));
        CHECK(count_of(&calls) == 1 && calls.call[0].reason == SCI_CB_CONNECT);
        TRY(SCIDisconnectSegment(other, 0, &error));
    }
    scenario_meet(scenario);
}

enum { MANY = 8 };

/* What one of many connections was told. */
struct told {
    unsigned int connected, ended, disordered;
    unsigned int count;
};

static unsigned int inside, overlaps;

static sci_callback_action_t on_one_of_many(void *arg, sci_remote_segment_t segment,
                                            sci_segment_cb_reason_t reason, sci_error_t status)
{
    struct told *told = (struct told *)arg;
    unsigned int i;
    CALLED();
    (void)segment, (void)status;
    if (__atomic_fetch_add(&inside, 1, __ATOMIC_SEQ_CST) != 0)
        __atomic_store_n(&overlaps, 1, __ATOMIC_SEQ_CST);
    for (i = 0; i < 50; i++)
        scenario_pause();
    if (reason == SCI_CB_CONNECT) {
        told->disordered |= told->ended;
        told->connected++;
    } else
        told->ended++;
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&told->count, 1, __ATOMIC_SEQ_CST);
    return SCI_CALLBACK_CONTINUE;
}

/* Many connect in the background: one callback at a time, and for each its making before its end. */
static void many_in_the_background(struct scenario *scenario)
{
    static struct told many[MANY];
    unsigned int flags = SCI_FLAG_USE_CALLBACK | SCI_FLAG_ASYNCHRONOUS_CONNECT, i;
    if (scenario->owner) {
        sci_local_segment_t own = offer(scenario, NULL, NULL, 0);
        sci_segment_cb_reason_t reason;
        unsigned int node, adapter;
        scenario_meet(scenario);
        for (i = 0; i < MANY; i++) {
            TRY(reason = SCIWaitForLocalSegmentEvent(own, &node, &adapter, SOON, 0, &error));
            CHECK(reason == SCI_CB_CONNECT);
        }
        TRY(SCIRemoveSegment(own, 0, &error));
    } else {
        sci_remote_segment_t segments[MANY];
        scenario_meet(scenario);
        for (i = 0; i < MANY; i++)
            TRY(SCIConnectSegment(scenario->sd, &segments[i], scenario->peer, ID, 0, on_one_of_many,
                                  &many[i], SOON, flags, &error));
        for (i = 0; i < MANY; i++)
            AWAIT(__atomic_load_n(&many[i].count, __ATOMIC_SEQ_CST) == 2);
        CHECK(!__atomic_load_n(&overlaps, __ATOMIC_SEQ_CST));
        for (i = 0; i < MANY; i++) {
            CHECK(many[i].connected == 1 && many[i].ended == 1 && !many[i].disordered);
            TRY(SCIDisconnectSegment(segments[i], 0, &error));
        }
    }
    scenario_meet(scenario);
}

static int waiting;

static void *wait_in_thread(void *arg)
{
    unsigned int node, adapter;
    sci_error_t answer;
    __atomic_store_n(&waiting, 1, __ATOMIC_SEQ_CST);
    SCIWaitForLocalSegmentEvent(*(sci_local_segment_t *)arg, &node, &adapter, SCI_INFINITE_TIMEOUT,
                                0, &answer);
    scenario_expect(__FILE__, __LINE__, "waiting for what is removed", answer, SCI_ERR_CANCELLED);
    return NULL;
}

/* Removing a segment ends a wait for it, begun before. */
static void removed_while_waited_for(struct scenario *scenario)
{
    sci_local_segment_t segment = offer(scenario, NULL, NULL, 0);
    pthread_t thread;
    unsigned int i;
    CHECK(pthread_create(&thread, NULL, wait_in_thread, &segment) == 0);
    AWAIT(__atomic_load_n(&waiting, __ATOMIC_SEQ_CST));
    for (i = 0; i < 200; i++) /* the thread is at the wait, or inside of it */
        scenario_pause();
    TRY(SCIRemoveSegment(segment, 0, &error));
    CHECK(pthread_join(thread, NULL) == 0);
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    scenario_begin(&scenario, argc, argv);
    waited_for(&scenario);
    local_callbacks(&scenario);
    withdrawn(&scenario, SCI_FLAG_NOTIFY);
    withdrawn(&scenario, SCI_FLAG_FORCE_DISCONNECT);
    withdrawn(&scenario, SCI_FLAG_FORCE_REMOVE);
    connected_in_the_background(&scenario);
    cancelled_when_connected(&scenario);
    many_in_the_background(&scenario);
    if (scenario.owner)
        removed_while_waited_for(&scenario);
    scenario_end(&scenario);
    return 0;
}
