/*
 * What is left when something ends: connections to what is gone, sequences, threads and
 * descriptors of interrupts; and callbacks, of which none comes after the call that ends them.
 */
#define _DEFAULT_SOURCE

#include "scenario.h"

#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ID = 0x4e40, ASYNC = 0x4e50, VICTIM = 0x4e60, NUMBER = 640, SIZE = 4096 };

static sci_local_segment_t offer(struct scenario *scenario, unsigned int id)
{
    sci_local_segment_t segment;
    TRY(SCICreateSegment(scenario->sd, &segment, id, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    return segment;
}

/* The owner leaves: its peer reads what was there last, is not kept open by what is gone, and may
 * still ask what it was. */
static void owner_leaves(struct scenario *scenario)
{
    sci_map_t map;
    volatile uint32_t *word;
    if (scenario->owner) {
        sci_local_segment_t segment = offer(scenario, ID);
        TRY(word = (volatile uint32_t *)SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0,
                                                           &error));
        scenario_meet(scenario);
        *word = 0xc0de;
        TRY(SCIUnmapSegment(map, 0, &error));
        TRY(SCIRemoveSegment(segment, 0, &error));
        scenario_meet(scenario);
    } else {
        sci_desc_t sd;
        sci_remote_segment_t remote;
        sci_segment_cb_reason_t reason;
        sci_error_t status;
        TRY(SCIOpen(&sd, 0, &error));
        POLL(SCI_ERR_NO_SUCH_SEGMENT,
             SCIConnectSegment(sd, &remote, scenario->peer, ID, 0, NULL, NULL, 0, 0, &error));
        TRY(word = (volatile uint32_t *)SCIMapRemoteSegment(remote, &map, 0, SIZE, NULL, 0,
                                                            &error));
        scenario_meet(scenario);
        TRY(reason = SCIWaitForRemoteSegmentEvent(remote, &status, SOON, 0, &error));
        CHECK(reason == SCI_CB_DISCONNECT && *word == 0xc0de);
        TRY(SCIClose(sd, 0, &error));
        CHECK(*word == 0xc0de);
        TRY(SCIDisconnectSegment(remote, 0, &error));
        CHECK(SCIGetRemoteSegmentId(remote) == ID);
        CHECK(SCIGetRemoteSegmentNodeId(remote) == scenario->peer);
        CHECK(*word == 0xc0de);
        TRY(SCIUnmapSegment(map, 0, &error));
        CHECK(SCIGetRemoteSegmentId(remote) == ID);
        scenario_meet(scenario);
    }
}

/* Owns a segment until it is killed. */
static void be_victim(void)
{
    sci_desc_t sd;
    sci_local_segment_t segment;
    sci_map_t map;
    volatile uint32_t *word;
    TRY(SCIInitialize(0, &error));
    TRY(SCIOpen(&sd, 0, &error));
    TRY(SCICreateSegment(sd, &segment, VICTIM, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(word = (volatile uint32_t *)SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0, &error));
    *word = 0xdead;
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    CHECK(write(STDOUT_FILENO, "", 1) == 1);
    for (;;)
        pause();
}

/* The owner is killed: its peer is told that it lost the segment, and reads what was there last. */
static void owner_dies(struct scenario *scenario)
{
    if (scenario->owner) {
        int ready[2];
        char byte;
        pid_t victim;
        CHECK(pipe(ready) == 0);
        victim = fork();
        CHECK(victim >= 0);
        if (victim == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            dup2(ready[1], STDOUT_FILENO);
            execl("/proc/self/exe", "removals", "victim", (char *)NULL);
            _exit(1);
        }
        close(ready[1]);
        CHECK(read(ready[0], &byte, 1) == 1);
        close(ready[0]);
        scenario_meet(scenario);
        scenario_meet(scenario);
        CHECK(kill(victim, SIGKILL) == 0);
        CHECK(waitpid(victim, NULL, 0) == victim);
        scenario_meet(scenario);
    } else {
        sci_remote_segment_t remote;
        sci_segment_cb_reason_t reason;
        sci_error_t status;
        sci_map_t map;
        volatile uint32_t *word;
        scenario_meet(scenario);
        TRY(SCIConnectSegment(scenario->sd, &remote, scenario->peer, VICTIM, 0, NULL, NULL, SOON, 0,
                              &error));
        TRY(word = (volatile uint32_t *)SCIMapRemoteSegment(remote, &map, 0, SIZE, NULL, 0,
                                                            &error));
        CHECK(*word == 0xdead);
        scenario_meet(scenario);
        TRY(reason = SCIWaitForRemoteSegmentEvent(remote, &status, SOON, 0, &error));
        CHECK(reason == SCI_CB_LOST && *word == 0xdead);
        TRY(SCIUnmapSegment(map, 0, &error));
        TRY(SCIDisconnectSegment(remote, 0, &error));
        scenario_meet(scenario);
    }
}

/* Stores that were made before the owner left have arrived; those after that have not. Between
 * machines nobody knows of the former, when it has left before anybody asked. */
static void checked_after_the_owner_left(struct scenario *scenario)
{
    if (scenario->owner) {
        sci_local_segment_t segment = offer(scenario, ID);
        scenario_meet(scenario);
        TRY(SCIRemoveSegment(segment, 0, &error));
        scenario_meet(scenario);
    } else {
        sci_remote_segment_t remote;
        sci_sequence_t sequence;
        sci_sequence_status_t state;
        sci_segment_cb_reason_t reason;
        sci_error_t status;
        sci_map_t map;
        POLL(SCI_ERR_NO_SUCH_SEGMENT,
             SCIConnectSegment(scenario->sd, &remote, scenario->peer, ID, 0, NULL, NULL, 0, 0, &error));
        TRY(SCIMapRemoteSegment(remote, &map, 0, SIZE, NULL, 0, &error));
        TRY(SCICreateMapSequence(map, &sequence, 0, &error));
        TRY(state = SCIStartSequence(sequence, 0, &error));
        CHECK(state == SCI_SEQ_OK);
        scenario_meet(scenario);
        TRY(reason = SCIWaitForRemoteSegmentEvent(remote, &status, SOON, 0, &error));
        CHECK(reason == SCI_CB_DISCONNECT);
        if (scenario_between_machines()) {
            REFUSED(SCI_ERR_TRANSFER_FAILED, state = SCICheckSequence(sequence, 0, &error));
            CHECK(state == SCI_SEQ_NOT_RETRIABLE);
        } else {
            TRY(state = SCICheckSequence(sequence, 0, &error));
            CHECK(state == SCI_SEQ_OK);
        }
        REFUSED(SCI_ERR_TRANSFER_FAILED, state = SCICheckSequence(sequence, 0, &error));
        REFUSED(SCI_ERR_TRANSFER_FAILED, state = SCIStartSequence(sequence, 0, &error));
        CHECK(state == SCI_SEQ_NOT_RETRIABLE);
        /* Unmapping ends the sequence. */
        TRY(SCIUnmapSegment(map, 0, &error));
        REFUSED_SOMEHOW(SCICheckSequence(sequence, 0, &error));
        REFUSED_SOMEHOW(SCIRemoveSequence(sequence, 0, &error));
        TRY(SCIDisconnectSegment(remote, 0, &error));
        scenario_meet(scenario);
    }
}

static unsigned int entries(const char *folder)
{
    unsigned int count = 0;
    DIR *open = opendir(folder);
    CHECK(open != NULL);
    while (readdir(open) != NULL)
        count++;
    closedir(open);
    return count;
}

/* The threads of this process. One that was joined is listed for a moment longer, until the system
 * has taken it apart: the count that stays the same is meant. */
static unsigned int threads_now(void)
{
    unsigned int count = entries("/proc/self/task"), same = 0;
    while (same < 5) {
        unsigned int again;
        usleep(1000);
        again = entries("/proc/self/task");
        same = again == count ? same + 1 : 0;
        count = again;
    }
    return count;
}

static sci_callback_action_t on_data(void *arg, sci_local_data_interrupt_t interrupt, void *data,
                                     unsigned int length, sci_error_t status)
{
    (void)arg, (void)interrupt, (void)data, (void)length, (void)status;
    return SCI_CALLBACK_CONTINUE;
}

static sci_callback_action_t on_plain(void *arg, sci_local_interrupt_t interrupt,
                                      sci_error_t status)
{
    (void)arg, (void)interrupt, (void)status;
    return SCI_CALLBACK_CONTINUE;
}

/* When the removal returns, an interrupt's thread and descriptor are gone. */
static void interrupts_leave_nothing(struct scenario *scenario)
{
    unsigned int round, threads = threads_now(), open = entries("/proc/self/fd");
    for (round = 0; round < 50; round++) {
        sci_local_data_interrupt_t data;
        sci_local_interrupt_t plain, shared;
        unsigned int number = NUMBER;
        TRY(SCICreateDataInterrupt(scenario->sd, &data, 0, &number, on_data, NULL,
                                   SCI_FLAG_USE_CALLBACK | SCI_FLAG_FIXED_INTNO, &error));
        TRY(SCICreateInterrupt(scenario->sd, &plain, 0, &number, on_plain, NULL,
                               SCI_FLAG_USE_CALLBACK | SCI_FLAG_FIXED_INTNO, &error));
        number++;
        TRY(SCICreateInterrupt(scenario->sd, &shared, 0, &number, on_plain, NULL,
                               SCI_FLAG_USE_CALLBACK | SCI_FLAG_FIXED_INTNO | SCI_FLAG_SHARED_INT,
                               &error));
        TRY(SCIRemoveDataInterrupt(data, 0, &error));
        TRY(SCIRemoveInterrupt(plain, 0, &error));
        TRY(SCIRemoveInterrupt(shared, 0, &error));
        CHECK(entries("/proc/self/fd") == open);
        CHECK(threads_now() == threads);
    }
}

/* What a callback was given, which the program takes back when it has ended what calls. */
struct given {
    int ended;
    unsigned int calls;
};

static void called(struct given *given)
{
    CALLED();
    if (__atomic_load_n(&given->ended, __ATOMIC_SEQ_CST))
        scenario_fail(__FILE__, __LINE__, "called after the end");
    __atomic_add_fetch(&given->calls, 1, __ATOMIC_SEQ_CST);
    scenario_pause();
    if (__atomic_load_n(&given->ended, __ATOMIC_SEQ_CST))
        scenario_fail(__FILE__, __LINE__, "ended while it was called");
}

static sci_callback_action_t on_remote(void *arg, sci_remote_segment_t segment,
                                       sci_segment_cb_reason_t reason, sci_error_t status)
{
    (void)segment, (void)reason, (void)status;
    called((struct given *)arg);
    return SCI_CALLBACK_CONTINUE;
}

/* A connection in the background is ended before, while and after it is made. */
static void ended_while_it_connects(struct scenario *scenario)
{
    enum { ROUNDS = 300 };
    static struct given given[ROUNDS];
    unsigned int flags = SCI_FLAG_USE_CALLBACK | SCI_FLAG_ASYNCHRONOUS_CONNECT, i, j;
    if (scenario->owner) {
        sci_local_segment_t segment = offer(scenario, ASYNC);
        scenario_meet(scenario);
        scenario_meet(scenario);
        TRY(SCIRemoveSegment(segment, 0, &error));
        return;
    }
    scenario_meet(scenario);
    for (i = 0; i < ROUNDS; i++) {
        sci_desc_t sd;
        sci_remote_segment_t remote;
        TRY(SCIOpen(&sd, 0, &error));
        /* Every other one is to something that is not there. */
        TRY(SCIConnectSegment(sd, &remote, scenario->peer, ASYNC + i % 2, 0, on_remote, &given[i],
                              SOON, flags, &error));
        for (j = 0; j < i % 5 * 2000; j++)
            SCIFlush(NULL, 0);
        TRY(SCIDisconnectSegment(remote, 0, &error));
        __atomic_store_n(&given[i].ended, 1, __ATOMIC_SEQ_CST);
        TRY(SCIClose(sd, 0, &error));
    }
    for (i = 0; i < 100; i++)
        scenario_pause();
    scenario_meet(scenario);
}

static sci_callback_action_t on_dma(void *arg, sci_dma_queue_t queue, sci_error_t status)
{
    (void)queue;
    CHECK(status == SCI_ERR_OK);
    called((struct given *)arg);
    return SCI_CALLBACK_CONTINUE;
}

/* A queue is removed when its transfer is done, before or while its callback is called. */
static void queue_removed_before_it_calls(struct scenario *scenario)
{
    enum { ROUNDS = 300 };
    static struct given given[ROUNDS];
    sci_local_segment_t local = offer(scenario, ID + 2 + (scenario->owner ? 1U : 0U));
    sci_remote_segment_t remote;
    unsigned int i, j;
    TRY(SCIConnectSegment(scenario->sd, &remote, scenario->local, ID + 2 + (scenario->owner ? 1U : 0U), 0,
                          NULL, NULL, SOON, 0, &error));
    for (i = 0; i < ROUNDS; i++) {
        sci_dma_queue_t queue;
        TRY(SCICreateDMAQueue(scenario->sd, &queue, 0, 1, 0, &error));
        TRY(SCIStartDmaTransfer(queue, local, remote, 0, 64, 128, on_dma, &given[i],
                                SCI_FLAG_USE_CALLBACK, &error));
        CHECK(SCIWaitForDMAQueue(queue, SOON, 0, &error) == SCI_DMAQUEUE_DONE);
        for (j = 0; j < i % 5 * 200; j++)
            SCIFlush(NULL, 0);
        TRY(SCIRemoveDMAQueue(queue, 0, &error));
        __atomic_store_n(&given[i].ended, 1, __ATOMIC_SEQ_CST);
    }
    for (i = 0; i < 100; i++)
        scenario_pause();
    TRY(SCIDisconnectSegment(remote, 0, &error));
    TRY(SCIRemoveSegment(local, 0, &error));
}

/* What the end of everything does to a transfer. */
static sci_callback_action_t on_end(void *arg, sci_dma_queue_t queue, sci_error_t status)
{
    (void)queue, (void)status;
    called((struct given *)arg);
    return SCI_CALLBACK_CONTINUE;
}

/* The library ends while connections are made in the background and transfers call back. */
static void terminated_while_it_works(unsigned int node, unsigned int id)
{
    enum { ROUNDS = 100 };
    static struct given connecting[ROUNDS], transferring[ROUNDS];
    unsigned int flags = SCI_FLAG_USE_CALLBACK | SCI_FLAG_ASYNCHRONOUS_CONNECT, i, j;
    for (i = 0; i < ROUNDS; i++) {
        sci_desc_t sd;
        sci_local_segment_t local;
        sci_remote_segment_t remote, late;
        sci_dma_queue_t queue;
        TRY(SCIInitialize(0, &error));
        TRY(SCIOpen(&sd, 0, &error));
        TRY(SCICreateSegment(sd, &local, id, SIZE, NULL, NULL, 0, &error));
        TRY(SCIPrepareSegment(local, 0, 0, &error));
        TRY(SCISetSegmentAvailable(local, 0, 0, &error));
        TRY(SCIConnectSegment(sd, &remote, node, id, 0, NULL, NULL, SOON, 0, &error));
        TRY(SCICreateDMAQueue(sd, &queue, 0, 1, 0, &error));
        TRY(SCIStartDmaTransfer(queue, local, remote, 0, 64, 128, on_end, &transferring[i],
                                SCI_FLAG_USE_CALLBACK, &error));
        /* Every other one is to something that is not there. */
        TRY(SCIConnectSegment(sd, &late, node, id + i % 2 * 64, 0, on_remote, &connecting[i], SOON,
                              flags, &error));
        for (j = 0; j < i % 5 * 2000; j++)
            SCIFlush(NULL, 0);
        SCITerminate();
        __atomic_store_n(&connecting[i].ended, 1, __ATOMIC_SEQ_CST);
        __atomic_store_n(&transferring[i].ended, 1, __ATOMIC_SEQ_CST);
    }
    for (i = 0; i < 100; i++)
        scenario_pause();
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    if (argc == 2 && strcmp(argv[1], "victim") == 0)
        be_victim();
    scenario_begin(&scenario, argc, argv);
    owner_leaves(&scenario);
    owner_dies(&scenario);
    checked_after_the_owner_left(&scenario);
    if (scenario.owner) /* both may be on one host */
        interrupts_leave_nothing(&scenario);
    scenario_meet(&scenario);
    ended_while_it_connects(&scenario);
    queue_removed_before_it_calls(&scenario);
    scenario_end(&scenario);
    terminated_while_it_works(scenario.local, ASYNC + 2 + (scenario.owner ? 1U : 0U));
    return 0;
}
