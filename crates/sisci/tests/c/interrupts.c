/*
 * Interrupts: numbers that programs choose or are given, triggers that come before anybody waits,
 * and what is left when one is removed.
 */
#define _DEFAULT_SOURCE

#include "scenario.h"

#include <limits.h>
#include <pthread.h>
#include <time.h>

/* A number that both sides know. */
enum { NUMBER = 0x30003 };

static sci_local_interrupt_t create(struct scenario *scenario, unsigned int number, unsigned int flags)
{
    sci_local_interrupt_t interrupt;
    unsigned int got = number;
    TRY(SCICreateInterrupt(scenario->sd, &interrupt, 0, &got, NULL, NULL, flags | SCI_FLAG_FIXED_INTNO,
                           &error));
    CHECK(got == number);
    return interrupt;
}

static sci_remote_interrupt_t connect_to(struct scenario *scenario, unsigned int number)
{
    sci_remote_interrupt_t interrupt;
    TRY(SCIConnectInterrupt(scenario->sd, &interrupt, scenario->peer, 0, number, SOON, 0, &error));
    return interrupt;
}

static void trigger(sci_remote_interrupt_t interrupt, unsigned int times)
{
    while (times-- > 0)
        TRY(SCITriggerInterrupt(interrupt, 0, &error));
}

/* A wait that nobody ends is over when its time is, and not when somebody else's is. */
static void expires(sci_local_interrupt_t interrupt)
{
    enum { TRIES = 5, WAIT = 10, MOST = 200 };
    long shortest = LONG_MAX;
    int i;
    /* A machine that has much to do may be late once. */
    for (i = 0; i < TRIES && shortest >= MOST; i++) {
        struct timespec begun, over;
        long took;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        REFUSED(SCI_ERR_TIMEOUT, SCIWaitForInterrupt(interrupt, WAIT, 0, &error));
        clock_gettime(CLOCK_MONOTONIC, &over);
        took = (over.tv_sec - begun.tv_sec) * 1000 + (over.tv_nsec - begun.tv_nsec) / 1000000;
        if (took < shortest)
            shortest = took;
    }
    CHECK(shortest < MOST);
}

/* Nobody waits when it is triggered: it is remembered, once. */
static void remembered(struct scenario *scenario)
{
    if (scenario->owner) {
        sci_local_interrupt_t interrupt;
        scenario_meet(scenario); /* there is none yet */
        interrupt = create(scenario, NUMBER, 0);
        REFUSED(SCI_ERR_TIMEOUT, SCIWaitForInterrupt(interrupt, 0, 0, &error));
        expires(interrupt);
        scenario_meet(scenario);
        scenario_meet(scenario); /* it was triggered */
        TRY(SCIWaitForInterrupt(interrupt, 0, 0, &error));
        REFUSED(SCI_ERR_TIMEOUT, SCIWaitForInterrupt(interrupt, 10, 0, &error));
        scenario_meet(scenario);
        TRY(SCIWaitForInterrupt(interrupt, SCI_INFINITE_TIMEOUT, 0, &error));
        scenario_meet(scenario);
        scenario_meet(scenario); /* it was triggered three times: that may be one */
        TRY(SCIWaitForInterrupt(interrupt, SOON, 0, &error));
        TRY(SCIRemoveInterrupt(interrupt, 0, &error));
        REFUSED_SOMEHOW(SCIRemoveInterrupt(interrupt, 0, &error));
    } else {
        sci_remote_interrupt_t interrupt;
        REFUSED(SCI_ERR_NO_SUCH_INTNO, SCIConnectInterrupt(scenario->sd, &interrupt, scenario->peer, 0,
                                                           NUMBER, 0, 0, &error));
        scenario_meet(scenario);
        POLL(SCI_ERR_NO_SUCH_INTNO, SCIConnectInterrupt(scenario->sd, &interrupt, scenario->peer, 0,
                                                        NUMBER, 0, 0, &error));
        scenario_meet(scenario);
        trigger(interrupt, 1);
        scenario_meet(scenario);
        scenario_meet(scenario);
        trigger(interrupt, 1); /* somebody waits, or is about to */
        scenario_meet(scenario);
        trigger(interrupt, 3);
        scenario_meet(scenario);
        TRY(SCIDisconnectInterrupt(interrupt, 0, &error));
    }
    scenario_meet(scenario);
}

/* Each trigger of a counting interrupt is one to wait for. */
static void counted(struct scenario *scenario)
{
    enum { TIMES = 1000 };
    unsigned int i;
    if (scenario->owner) {
        sci_local_interrupt_t interrupt = create(scenario, 1, SCI_FLAG_COUNTING_INT);
        scenario_meet(scenario);
        scenario_meet(scenario);
        for (i = 0; i < TIMES; i++)
            TRY(SCIWaitForInterrupt(interrupt, SOON, 0, &error));
        REFUSED(SCI_ERR_TIMEOUT, SCIWaitForInterrupt(interrupt, 10, 0, &error));
        TRY(SCIRemoveInterrupt(interrupt, 0, &error));
    } else {
        sci_remote_interrupt_t interrupt;
        scenario_meet(scenario);
        interrupt = connect_to(scenario, 1);
        trigger(interrupt, TIMES);
        scenario_meet(scenario);
        TRY(SCIDisconnectInterrupt(interrupt, 0, &error));
    }
    scenario_meet(scenario);
}

/* Stores made before the trigger are there when it is seen. */
static void after_stores(struct scenario *scenario)
{
    enum { ROUNDS = 200, ID = 0x1e7e };
    unsigned int i;
    sci_map_t map;
    volatile uint32_t *word;
    if (scenario->owner) {
        sci_local_interrupt_t interrupt = create(scenario, 0, 0);
        sci_local_segment_t segment;
        TRY(SCICreateSegment(scenario->sd, &segment, ID, 64, NULL, NULL, 0, &error));
        TRY(SCIPrepareSegment(segment, 0, 0, &error));
        TRY(word = (volatile uint32_t *)SCIMapLocalSegment(segment, &map, 0, 64, NULL, 0, &error));
        TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
        scenario_meet(scenario);
        for (i = 1; i <= ROUNDS; i++) {
            TRY(SCIWaitForInterrupt(interrupt, SOON, 0, &error));
            CHECK(*word == i);
            scenario_meet(scenario);
        }
        scenario_meet(scenario);
        TRY(SCIUnmapSegment(map, 0, &error));
        TRY(SCIRemoveSegment(segment, 0, &error));
        TRY(SCIRemoveInterrupt(interrupt, 0, &error));
    } else {
        sci_remote_interrupt_t interrupt;
        sci_remote_segment_t segment;
        scenario_meet(scenario);
        interrupt = connect_to(scenario, 0);
        TRY(SCIConnectSegment(scenario->sd, &segment, scenario->peer, ID, 0, NULL, NULL, SOON, 0,
                              &error));
        TRY(word = (volatile uint32_t *)SCIMapRemoteSegment(segment, &map, 0, 64, NULL, 0,
                                                            &error));
        for (i = 1; i <= ROUNDS; i++) {
            *word = i;
            trigger(interrupt, 1);
            scenario_meet(scenario);
        }
        TRY(SCIUnmapSegment(map, 0, &error));
        TRY(SCIDisconnectSegment(segment, 0, &error));
        TRY(SCIDisconnectInterrupt(interrupt, 0, &error));
        scenario_meet(scenario);
    }
}

/* A peer that waits for a number to exist, connects and triggers at once: no trigger is lost. */
static void triggered_as_soon_as_it_exists(struct scenario *scenario)
{
    enum { ROUNDS = 400, FIRST = 4242 };
    unsigned int i;
    for (i = 0; i < ROUNDS; i++) {
        if (scenario->owner) {
            sci_local_interrupt_t interrupt = create(scenario, FIRST + i, 0);
            TRY(SCIWaitForInterrupt(interrupt, SOON, 0, &error));
            TRY(SCIRemoveInterrupt(interrupt, 0, &error));
        } else {
            sci_remote_interrupt_t interrupt;
            do {
                SCIConnectInterrupt(scenario->sd, &interrupt, scenario->peer, 0, FIRST + i, 0, 0, &error);
            } while (error == SCI_ERR_NO_SUCH_INTNO);
            CHECK(error == SCI_ERR_OK);
            trigger(interrupt, 1);
            TRY(SCIDisconnectInterrupt(interrupt, 0, &error));
        }
    }
    scenario_meet(scenario);
}

static unsigned int called;
static sci_callback_action_t answer = SCI_CALLBACK_CONTINUE;

static sci_callback_action_t on_interrupt(void *arg, sci_local_interrupt_t interrupt,
                                          sci_error_t status)
{
    sci_callback_action_t now;
    CALLED();
    now = answer; /* before the call is counted: then the scenario goes on */
    CHECK(arg == (void *)&called && interrupt != NULL && status == SCI_ERR_OK);
    __atomic_add_fetch(&called, 1, __ATOMIC_SEQ_CST);
    return now;
}

static unsigned int calls(void)
{
    return __atomic_load_n(&called, __ATOMIC_SEQ_CST);
}

/* Callbacks, and numbers that the library chooses: the program's variable need not be set. */
static void called_back(struct scenario *scenario)
{
    unsigned int number = 0xdeadbeefU;
    if (scenario->owner) {
        sci_local_interrupt_t interrupt, other;
        unsigned int other_number;
        TRY(SCICreateInterrupt(scenario->sd, &interrupt, 0, &number, on_interrupt, &called,
                               SCI_FLAG_USE_CALLBACK | SCI_FLAG_COUNTING_INT, &error));
        TRY(SCICreateInterrupt(scenario->sd, &other, 0, &other_number, on_interrupt, NULL, 0,
                               &error)); /* without the flag, the callback is nobody's */
        CHECK(number != other_number);
        scenario_send(scenario, 0, number);
        scenario_meet(scenario);
        AWAIT(calls() == 5);
        answer = SCI_CALLBACK_CANCEL;
        scenario_meet(scenario);
        AWAIT(calls() == 6);
        scenario_meet(scenario);
        scenario_meet(scenario); /* triggered, but it does not want to hear of it */
        TRY(SCIRemoveInterrupt(interrupt, 0, &error));
        CHECK(calls() == 6);
        TRY(SCIRemoveInterrupt(other, 0, &error));
    } else {
        sci_remote_interrupt_t interrupt;
        number = scenario_receive(scenario, 0);
        interrupt = connect_to(scenario, number);
        trigger(interrupt, 5);
        scenario_meet(scenario);
        scenario_meet(scenario);
        trigger(interrupt, 1);
        scenario_meet(scenario);
        trigger(interrupt, 1);
        scenario_meet(scenario);
        TRY(SCIDisconnectInterrupt(interrupt, 0, &error));
    }
    scenario_meet(scenario);
}

/* Of two with one number, both are triggered; without the flag, a number is there once. */
static void shared(struct scenario *scenario)
{
    if (scenario->owner) {
        unsigned int number = 25;
        sci_local_interrupt_t first = create(scenario, number, SCI_FLAG_SHARED_INT);
        sci_local_interrupt_t second = create(scenario, number, SCI_FLAG_SHARED_INT);
        sci_local_interrupt_t alone = create(scenario, 24, 0), refused;
        number = 24;
        REFUSED_SOMEHOW(SCICreateInterrupt(scenario->sd, &refused, 0, &number, NULL, NULL,
                                           SCI_FLAG_FIXED_INTNO, &error));
        scenario_meet(scenario);
        TRY(SCIWaitForInterrupt(first, SOON, 0, &error));
        TRY(SCIWaitForInterrupt(second, SOON, 0, &error));
        scenario_meet(scenario);
        TRY(SCIRemoveInterrupt(first, 0, &error));
        TRY(SCIRemoveInterrupt(second, 0, &error));
        TRY(SCIRemoveInterrupt(alone, 0, &error));
        scenario_meet(scenario);
    } else {
        sci_remote_interrupt_t interrupt;
        scenario_meet(scenario);
        interrupt = connect_to(scenario, 25);
        trigger(interrupt, 1);
        scenario_meet(scenario);
        scenario_meet(scenario); /* both are removed: a trigger is a posted write, and reaches nobody */
        TRY(SCITriggerInterrupt(interrupt, 0, &error));
        TRY(SCIDisconnectInterrupt(interrupt, 0, &error));
    }
    scenario_meet(scenario);
}

/* Triggers go on while their owner removes the interrupt: none of them fails. */
static void triggered_while_it_is_removed(struct scenario *scenario)
{
    enum { ROUNDS = 20, FIRST = 5000 };
    unsigned int i, j;
    for (i = 0; i < ROUNDS; i++) {
        if (scenario->owner) {
            sci_local_interrupt_t interrupt = create(scenario, FIRST + i, 0);
            TRY(SCIWaitForInterrupt(interrupt, SOON, 0, &error));
            TRY(SCIRemoveInterrupt(interrupt, 0, &error));
            scenario_meet(scenario);
        } else {
            sci_remote_interrupt_t interrupt;
            POLL(SCI_ERR_NO_SUCH_INTNO, SCIConnectInterrupt(scenario->sd, &interrupt, scenario->peer, 0,
                                                            FIRST + i, 0, 0, &error));
            for (j = 0; j < 2000; j++)
                trigger(interrupt, 1);
            scenario_meet(scenario);
            trigger(interrupt, 1);
            TRY(SCIDisconnectInterrupt(interrupt, 0, &error));
        }
    }
}

static int waiting;

static void *wait_in_thread(void *arg)
{
    sci_error_t ended;
    __atomic_store_n(&waiting, 1, __ATOMIC_SEQ_CST);
    SCIWaitForInterrupt(*(sci_local_interrupt_t *)arg, SCI_INFINITE_TIMEOUT, 0, &ended);
    scenario_expect(__FILE__, __LINE__, "waiting for what is removed", ended, SCI_ERR_CANCELLED);
    return NULL;
}

static void removed_while_waited_for(struct scenario *scenario)
{
    sci_local_interrupt_t interrupt = create(scenario, 23, 0);
    pthread_t thread;
    unsigned int i;
    CHECK(pthread_create(&thread, NULL, wait_in_thread, &interrupt) == 0);
    AWAIT(__atomic_load_n(&waiting, __ATOMIC_SEQ_CST));
    for (i = 0; i < 200; i++) /* the thread is at the wait, or inside of it */
        scenario_pause();
    TRY(SCIRemoveInterrupt(interrupt, 0, &error));
    CHECK(pthread_join(thread, NULL) == 0);
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    scenario_begin(&scenario, argc, argv);
    remembered(&scenario);
    counted(&scenario);
    after_stores(&scenario);
    triggered_as_soon_as_it_exists(&scenario);
    called_back(&scenario);
    shared(&scenario);
    triggered_while_it_is_removed(&scenario);
    if (scenario.owner)
        removed_while_waited_for(&scenario);
    scenario_end(&scenario);
    return 0;
}
