/*
 * A process that forks: what its child does, or ends, is not the parent's. Told alone.
 */
#define _DEFAULT_SOURCE

#include "scenario.h"

#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PARENTS = 0x5a60, CHILDS = 0x5a61, NUMBER = 77, SIZE = 8192 };

/* The child begins anew: its parent's handles are not its, and it can have all of its own. */
static int begins_anew(const struct scenario *scenario, sci_local_segment_t parents)
{
    sci_desc_t sd;
    sci_local_segment_t segment;
    sci_remote_segment_t remote;
    sci_dma_queue_t queue;
    sci_map_t map;
    volatile unsigned char *bytes;
    TRY(SCIInitialize(0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIRemoveSegment(parents, 0, &error));
    TRY(SCIOpen(&sd, 0, &error));
    TRY(SCIConnectSegment(sd, &remote, scenario->local, PARENTS, 0, NULL, NULL, SOON, 0, &error));
    TRY(SCICreateSegment(sd, &segment, CHILDS, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(bytes = (volatile unsigned char *)SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0,
                                                             &error));
    bytes[1] = 0x17;
    TRY(SCICreateDMAQueue(sd, &queue, 0, 1, 0, &error));
    TRY(SCIStartDmaTransfer(queue, segment, remote, 0, SIZE, 0, NULL, NULL, 0, &error));
    CHECK(SCIWaitForDMAQueue(queue, SOON, 0, &error) == SCI_DMAQUEUE_DONE);
    SCITerminate();
    return 0;
}

/* The child only ends what it never began. */
static int ends(void)
{
    SCITerminate();
    return 0;
}

/* The child releases everything that it finds. */
static int removes(const struct scenario *scenario, sci_local_segment_t parents,
                   sci_local_interrupt_t interrupt)
{
    sci_local_segment_t segment;
    REFUSED(SCI_ERR_NOT_INITIALIZED,
            SCICreateSegment(scenario->sd, &segment, CHILDS, SIZE, NULL, NULL, 0, &error));
    SCIRemoveInterrupt(interrupt, 0, &error);
    SCIRemoveSegment(parents, 0, &error);
    return 0;
}

static int busy = 1;

/* What other threads are at when the process forks. */
static void *call_all_the_time(void *arg)
{
    const struct scenario *scenario = (const struct scenario *)arg;
    while (__atomic_load_n(&busy, __ATOMIC_SEQ_CST)) {
        sci_desc_t sd;
        sci_local_segment_t segment;
        sci_error_t ignored;
        unsigned int node;
        SCIGetLocalNodeId(0, &node, 0, &ignored);
        SCIOpen(&sd, 0, &ignored);
        SCICreateSegment(sd, &segment, 0, 64, NULL, NULL, SCI_FLAG_AUTO_ID, &ignored);
        SCIRemoveSegment(segment, 0, &ignored);
        SCIClose(sd, 0, &ignored);
        (void)SCIGetLocalSegmentId(scenario->board);
    }
    return NULL;
}

static void ended_well(pid_t child);

/* A fork during other threads' calls has nothing of them, nor of what they hold. */
static void forks_among_calls(struct scenario *scenario, sci_local_segment_t segment)
{
    enum { THREADS = 2, ROUNDS = 40 };
    pthread_t threads[THREADS];
    unsigned int i;
    for (i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, call_all_the_time, scenario) == 0);
    for (i = 0; i < ROUNDS; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(10);
            _exit(i % 2 == 0 ? begins_anew(scenario, segment) : ends());
        }
        ended_well(child);
    }
    __atomic_store_n(&busy, 0, __ATOMIC_SEQ_CST);
    for (i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void ended_well(pid_t child)
{
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    sci_local_segment_t segment;
    sci_local_interrupt_t interrupt;
    sci_remote_interrupt_t trigger;
    sci_remote_segment_t remote;
    sci_dma_queue_t queue;
    sci_map_t map;
    unsigned int number = NUMBER;
    volatile unsigned char *bytes;
    pid_t child;
    scenario_begin(&scenario, argc, argv);
    TRY(SCICreateSegment(scenario.sd, &segment, PARENTS, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    TRY(bytes = (volatile unsigned char *)SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0,
                                                             &error));
    TRY(SCICreateInterrupt(scenario.sd, &interrupt, 0, &number, NULL, NULL, SCI_FLAG_FIXED_INTNO,
                           &error));
    /* The copy engine has its threads before the process forks. */
    TRY(SCIConnectSegment(scenario.sd, &remote, scenario.local, PARENTS, 0, NULL, NULL, SOON, 0,
                          &error));
    TRY(SCICreateDMAQueue(scenario.sd, &queue, 0, 1, 0, &error));
    TRY(SCIStartDmaTransfer(queue, segment, remote, 0, 8, 4096, NULL, NULL, SCI_FLAG_DMA_WAIT,
                            &error));

    child = fork();
    if (child == 0)
        _exit(begins_anew(&scenario, segment));
    ended_well(child);
    CHECK(bytes[1] == 0x17);
    child = fork();
    if (child == 0)
        _exit(ends());
    ended_well(child);
    child = fork();
    if (child == 0)
        _exit(removes(&scenario, segment, interrupt));
    ended_well(child);

    forks_among_calls(&scenario, segment);

    /* Everything of the parent's is there. */
    TRY(SCIConnectInterrupt(scenario.sd, &trigger, scenario.local, 0, NUMBER, SOON, 0, &error));
    TRY(SCITriggerInterrupt(trigger, 0, &error));
    TRY(SCIWaitForInterrupt(interrupt, SOON, 0, &error));
    TRY(SCIDisconnectInterrupt(trigger, 0, &error));
    TRY(SCIRemoveInterrupt(interrupt, 0, &error));
    CHECK(bytes[1] == 0x17);
    TRY(SCIStartDmaTransfer(queue, segment, remote, 0, 8, 4096, NULL, NULL, SCI_FLAG_DMA_WAIT,
                            &error));
    CHECK(bytes[4097] == 0x17);
    TRY(SCIRemoveDMAQueue(queue, 0, &error));
    TRY(SCIDisconnectSegment(remote, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
    scenario_end(&scenario);
    return 0;
}
