/*
 * Programs with signals of their own: threads that block them while memory moves beneath them,
 * handlers that interrupt calls, and a handler for the program's own faults. Told alone.
 */
#define _DEFAULT_SOURCE

#include "scenario.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { ID = 0x516a, NUMBER = 89, SIZE = 64 * 1024, WORDS = SIZE / 4, THREADS = 2 };

/* ---- the program's own faults ---- */

static unsigned char *own_page;
static volatile unsigned int own_faults;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)context;
    if (signal != SIGSEGV || info->si_addr != (void *)(own_page + 5))
        _exit(3); /* a fault that is not the program's came to it */
    own_faults = own_faults + 1;
    mprotect(own_page, 4096, PROT_READ | PROT_WRITE);
}

static void own_handler(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    own_page = (unsigned char *)mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own_page != (unsigned char *)MAP_FAILED);
}

static void fault(unsigned int before)
{
    CHECK(own_faults == before);
    *(volatile unsigned char *)(own_page + 5) = 1;
    CHECK(own_faults == before + 1);
    CHECK(mprotect(own_page, 4096, PROT_NONE) == 0);
}

/* ---- threads that block signals, and write all the time ---- */

static volatile uint32_t *words;
static int stop;
static uint32_t written[THREADS];

static void *write_words(void *arg)
{
    unsigned int nth = *(unsigned int *)arg, i;
    uint32_t round = 0;
    sigset_t all;
    sigfillset(&all);
    /* Where the kernel cannot hold writers of memory that moves (userfaultfd, Linux 6.4), the library
     * holds them in a handler of these. */
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, NULL) == 0);
    while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
        round++;
        for (i = nth; i < WORDS; i += THREADS * 64)
            words[i] = round;
        __atomic_store_n(&written[nth], round, __ATOMIC_SEQ_CST);
    }
    for (i = nth; i < WORDS; i += THREADS * 64)
        if (words[i] != round)
            scenario_fail(__FILE__, __LINE__, "word %u is %u, not %u", i, words[i], round);
    return NULL;
}

/* Each time somebody is forced out, the memory moves beneath its writers: no store is lost. */
static void written_while_it_moves(struct scenario *scenario)
{
    pthread_t threads[THREADS];
    unsigned int numbers[THREADS], i, round;
    sci_local_segment_t segment;
    sci_remote_segment_t remote;
    sci_map_t map;
    TRY(SCICreateSegment(scenario->sd, &segment, ID, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(words = (volatile uint32_t *)SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0, &error));
    for (i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(pthread_create(&threads[i], NULL, write_words, &numbers[i]) == 0);
    }
    for (round = 0; round < 8; round++) {
        uint32_t before[THREADS];
        TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
        TRY(SCIConnectSegment(scenario->sd, &remote, scenario->local, ID, 0, NULL, NULL, SOON, 0,
                              &error));
        TRY(SCISetSegmentUnavailable(segment, 0, SCI_FLAG_FORCE_DISCONNECT, &error));
        fault(round);
        for (i = 0; i < THREADS; i++)
            before[i] = __atomic_load_n(&written[i], __ATOMIC_SEQ_CST);
        for (i = 0; i < THREADS; i++)
            AWAIT(__atomic_load_n(&written[i], __ATOMIC_SEQ_CST) != before[i]);
        TRY(SCIDisconnectSegment(remote, 0, &error));
    }
    __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
    for (i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
}

/* ---- signals during calls ---- */

static volatile sig_atomic_t signals;
static pthread_t waiting;
static int quiet;

static void on_signal(int signal)
{
    (void)signal;
    signals++;
}

static void *send_signals(void *arg)
{
    (void)arg;
    while (!__atomic_load_n(&quiet, __ATOMIC_SEQ_CST)) {
        struct timespec moment = {0, 200000};
        CHECK(pthread_kill(waiting, SIGUSR1) == 0);
        nanosleep(&moment, NULL);
    }
    return NULL;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* No call ends early or fails because a handler ran meanwhile. */
static void interrupted(struct scenario *scenario)
{
    struct sigaction action;
    pthread_t sender;
    sci_local_interrupt_t own;
    sci_local_data_interrupt_t own_data;
    sci_remote_interrupt_t remote;
    sci_local_segment_t segment;
    unsigned int number = NUMBER, length, i;
    char message[8];
    double begun;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal; /* without SA_RESTART */
    sigemptyset(&action.sa_mask);
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    waiting = pthread_self();
    CHECK(pthread_create(&sender, NULL, send_signals, NULL) == 0);
    TRY(SCICreateInterrupt(scenario->sd, &own, 0, &number, NULL, NULL, SCI_FLAG_FIXED_INTNO, &error));
    TRY(SCICreateDataInterrupt(scenario->sd, &own_data, 0, &number, NULL, NULL, SCI_FLAG_FIXED_INTNO,
                               &error));
    TRY(SCICreateSegment(scenario->sd, &segment, ID, SIZE, NULL, NULL, 0, &error));
    begun = seconds();
    REFUSED(SCI_ERR_TIMEOUT, SCIWaitForInterrupt(own, 60, 0, &error));
    CHECK(seconds() - begun >= 0.06);
    begun = seconds();
    length = sizeof message;
    REFUSED(SCI_ERR_TIMEOUT, SCIWaitForDataInterrupt(own_data, message, &length, 60, 0, &error));
    CHECK(seconds() - begun >= 0.06);
    begun = seconds();
    REFUSED(SCI_ERR_TIMEOUT, SCIWaitForLocalSegmentEvent(segment, &number, &length, 60, 0,
                                                         &error));
    CHECK(seconds() - begun >= 0.06);
    for (i = 0; i < 200; i++) {
        TRY(SCIConnectInterrupt(scenario->sd, &remote, scenario->local, 0, NUMBER, SOON, 0, &error));
        TRY(SCITriggerInterrupt(remote, 0, &error));
        TRY(SCIWaitForInterrupt(own, SOON, 0, &error));
        TRY(SCIDisconnectInterrupt(remote, 0, &error));
    }
    __atomic_store_n(&quiet, 1, __ATOMIC_SEQ_CST);
    CHECK(pthread_join(sender, NULL) == 0);
    CHECK(signals > 100);
    TRY(SCIRemoveSegment(segment, 0, &error));
    TRY(SCIRemoveDataInterrupt(own_data, 0, &error));
    TRY(SCIRemoveInterrupt(own, 0, &error));
}

/* ---- signals that the program blocks, to take them itself ---- */

static unsigned int called;

static sci_callback_action_t on_interrupt(void *arg, sci_local_interrupt_t interrupt,
                                          sci_error_t status)
{
    (void)arg;
    (void)interrupt;
    (void)status;
    __atomic_add_fetch(&called, 1, __ATOMIC_SEQ_CST);
    return SCI_CALLBACK_CONTINUE;
}

static sci_callback_action_t on_transfer(void *arg, sci_dma_queue_t queue, sci_error_t status)
{
    (void)arg;
    (void)queue;
    (void)status;
    __atomic_add_fetch(&called, 1, __ATOMIC_SEQ_CST);
    return SCI_CALLBACK_CONTINUE;
}

/* With all of its threads started, the library takes no signal from the program. */
static void blocked(struct scenario *scenario)
{
    sigset_t taken, before;
    struct timespec patience = {30, 0};
    sci_local_segment_t segment;
    sci_remote_segment_t remote;
    sci_local_interrupt_t own;
    sci_remote_interrupt_t trigger;
    sci_dma_queue_t queue;
    unsigned int number = NUMBER, i;
    TRY(SCICreateSegment(scenario->sd, &segment, ID, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    TRY(SCIConnectSegment(scenario->sd, &remote, scenario->local, ID, 0, NULL, NULL, SOON, 0, &error));
    TRY(SCICreateInterrupt(scenario->sd, &own, 0, &number, on_interrupt, NULL,
                           SCI_FLAG_FIXED_INTNO | SCI_FLAG_USE_CALLBACK, &error));
    TRY(SCIConnectInterrupt(scenario->sd, &trigger, scenario->local, 0, NUMBER, SOON, 0, &error));
    TRY(SCITriggerInterrupt(trigger, 0, &error));
    TRY(SCICreateDMAQueue(scenario->sd, &queue, 0, 1, 0, &error));
    TRY(SCIStartDmaTransfer(queue, segment, remote, 0, 64, 4096, on_transfer, NULL,
                            SCI_FLAG_USE_CALLBACK, &error));
    AWAIT(__atomic_load_n(&called, __ATOMIC_SEQ_CST) == 2);
    sigemptyset(&taken);
    sigaddset(&taken, SIGTERM);
    CHECK(pthread_sigmask(SIG_BLOCK, &taken, &before) == 0);
    for (i = 0; i < 50; i++) {
        CHECK(kill(getpid(), SIGTERM) == 0);
        CHECK(sigtimedwait(&taken, NULL, &patience) == SIGTERM);
    }
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
    TRY(SCIRemoveDMAQueue(queue, 0, &error));
    TRY(SCIDisconnectInterrupt(trigger, 0, &error));
    TRY(SCIRemoveInterrupt(own, 0, &error));
    TRY(SCIDisconnectSegment(remote, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    own_handler();
    scenario_begin(&scenario, argc, argv);
    written_while_it_moves(&scenario);
    interrupted(&scenario);
    blocked(&scenario);
    scenario_end(&scenario);
    return 0;
}
