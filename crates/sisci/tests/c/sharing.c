/*
 * One segment, several processes of a host: a process shares it, another attaches; and segments
 * whose memory is the program's own. Run alone, it starts itself again as the other process.
 */
#define _DEFAULT_SOURCE

#include "scenario.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SHARED = 0x5a4e, HIDDEN = 0x5a4f, SIZE = 5000 };

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

/* Removed by force while it is mapped, an attached segment ends a wait for it, as an own one does. */
static void removed_by_force(sci_desc_t sd)
{
    sci_local_segment_t segment;
    sci_map_t map;
    pthread_t thread;
    size_t size;
    unsigned int i;
    alarm(30);
    TRY(SCIAttachLocalSegment(sd, &segment, SHARED, &size, NULL, NULL, 0, &error));
    TRY(SCIMapLocalSegment(segment, &map, 0, size, NULL, 0, &error));
    CHECK(pthread_create(&thread, NULL, wait_in_thread, &segment) == 0);
    AWAIT(__atomic_load_n(&waiting, __ATOMIC_SEQ_CST));
    for (i = 0; i < 200; i++) /* the thread is at the wait, or inside of it */
        scenario_pause();
    REFUSED(SCI_ERR_BUSY, SCIRemoveSegment(segment, 0, &error));
    TRY(SCIRemoveSegment(segment, SCI_FLAG_FORCE_REMOVE, &error));
    CHECK(pthread_join(thread, NULL) == 0);
    TRY(SCIUnmapSegment(map, 0, &error));
}

/* The other process: attaches to the shared one, and changes a byte that is told. */
static int attacher(void)
{
    sci_desc_t sd;
    sci_local_segment_t segment;
    sci_map_t map;
    volatile unsigned char *bytes;
    size_t size = 0;
    TRY(SCIInitialize(0, &error));
    TRY(SCIOpen(&sd, 0, &error));
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT,
            SCIAttachLocalSegment(sd, &segment, HIDDEN, &size, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT,
            SCIAttachLocalSegment(sd, &segment, 0x5a50, &size, NULL, NULL, 0, &error));
    TRY(SCIAttachLocalSegment(sd, &segment, SHARED, &size, NULL, NULL, 0, &error));
    CHECK(size == SIZE && SCIGetLocalSegmentSize(segment) == SIZE);
    CHECK(SCIGetLocalSegmentId(segment) == SHARED);
    TRY(bytes = (volatile unsigned char *)SCIMapLocalSegment(segment, &map, 0, size, NULL, 0,
                                                             &error));
    CHECK(bytes[1] == 0x11);
    bytes[SIZE - 1] = 0x22;
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
    removed_by_force(sd);
    TRY(SCIClose(sd, 0, &error));
    SCITerminate();
    return 0;
}

static void run_attacher(char *program)
{
    char role[] = "attacher";
    char *arguments[3];
    int status = -1;
    pid_t child;
    arguments[0] = program;
    arguments[1] = role;
    arguments[2] = NULL;
    child = fork();
    if (child == 0) {
        execv("/proc/self/exe", arguments);
        _exit(127);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void shared(struct scenario *scenario, char *program)
{
    sci_local_segment_t segment, hidden;
    sci_map_t map;
    volatile unsigned char *bytes;
    TRY(SCICreateSegment(scenario->sd, &segment, SHARED, SIZE, NULL, NULL, 0, &error));
    TRY(SCICreateSegment(scenario->sd, &hidden, HIDDEN, SIZE, NULL, NULL, 0, &error));
    TRY(bytes = (volatile unsigned char *)SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0,
                                                             &error));
    bytes[1] = 0x11;
    TRY(SCIShareSegment(segment, 0, &error));
    run_attacher(program);
    CHECK(bytes[SIZE - 1] == 0x22);
    /* It was not the other one's to remove. */
    run_attacher(program);
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
    TRY(SCIRemoveSegment(hidden, 0, &error));
}

/*
 * The owner removes what is attached: what was stored before is good, what comes later reaches nobody
 * and fails, and it is not mapped anew.
 */
static void owner_leaves(struct scenario *scenario)
{
    enum { LEFT = 0x5a53 };
    sci_local_segment_t own, attached;
    sci_sequence_t sequence;
    sci_sequence_status_t status;
    sci_segment_cb_reason_t reason;
    sci_map_t map, other;
    unsigned int node, adapter;
    size_t size;
    char bytes[64] = {0};
    TRY(SCICreateSegment(scenario->sd, &own, LEFT, SIZE, NULL, NULL, 0, &error));
    TRY(SCIShareSegment(own, 0, &error));
    TRY(SCIAttachLocalSegment(scenario->sd, &attached, LEFT, &size, NULL, NULL, 0, &error));
    TRY((void)SCIMapLocalSegment(attached, &map, 0, size, NULL, 0, &error));
    TRY(SCICreateMapSequence(map, &sequence, 0, &error));
    TRY(status = SCIStartSequence(sequence, 0, &error));
    CHECK(status == SCI_SEQ_OK);
    TRY(SCIMemCpy(sequence, bytes, map, 0, sizeof bytes, SCI_FLAG_ERROR_CHECK, &error));
    TRY(SCIRemoveSegment(own, 0, &error));
    TRY(reason = SCIWaitForLocalSegmentEvent(attached, &node, &adapter, SOON, 0, &error));
    CHECK(reason == SCI_CB_DISCONNECT);
    TRY(status = SCICheckSequence(sequence, 0, &error));
    CHECK(status == SCI_SEQ_OK);
    REFUSED(SCI_ERR_TRANSFER_FAILED, status = SCICheckSequence(sequence, 0, &error));
    CHECK(status == SCI_SEQ_NOT_RETRIABLE);
    REFUSED(SCI_ERR_TRANSFER_FAILED,
            SCIMemCpy(NULL, bytes, map, 0, sizeof bytes, SCI_FLAG_ERROR_CHECK, &error));
    REFUSED(SCI_ERR_NOT_CONNECTED,
            (void)SCIMapLocalSegment(attached, &other, 0, size, NULL, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIRemoveSegment(attached, 0, &error));
}

/*
 * Memory that is not all there cannot be a segment's: it stays as it is, and so does the segment, which
 * nobody is offered before it has other memory.
 */
static void not_registered(sci_local_segment_t segment, size_t size)
{
    unsigned char *own = (unsigned char *)mmap(NULL, size, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    CHECK(munmap(own + size - 4096, 4096) == 0);
    REFUSED(SCI_ERR_ILLEGAL_ADDRESS, SCIRegisterSegmentMemory(own, size, segment, 0, &error));
    memset(own, 0x41, size - 4096);
    CHECK(munmap(own, size - 4096) == 0);
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_OPERATION, SCISetSegmentAvailable(segment, 0, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_OPERATION, SCIShareSegment(segment, 0, &error));
}

/*
 * The program's own memory as a segment: who connects sees what the program stores, and the
 * reverse.
 */
static void registered(struct scenario *scenario)
{
    enum { PAGES = 3 * 4096, ID = 0x5a51 };
    sci_local_segment_t segment, filled;
    sci_remote_segment_t remote;
    sci_map_t map;
    volatile unsigned char *bytes;
    unsigned char *own = (unsigned char *)mmap(NULL, PAGES, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    memset(own, 0x31, PAGES);
    TRY(SCICreateSegment(scenario->sd, &filled, ID + 1, PAGES, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_OPERATION, SCIRegisterSegmentMemory(own, PAGES, filled, 0, &error));
    TRY(SCIRemoveSegment(filled, 0, &error));

    TRY(SCICreateSegment(scenario->sd, &segment, ID, PAGES, NULL, NULL, SCI_FLAG_EMPTY, &error));
    REFUSED_SOMEHOW(SCIMapLocalSegment(segment, &map, 0, PAGES, NULL, 0, &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIRegisterSegmentMemory(own, PAGES + 4096, segment, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_ADDRESS, SCIRegisterSegmentMemory(NULL, PAGES, segment, 0, &error));
    not_registered(segment, PAGES);
    TRY(SCIRegisterSegmentMemory(own, PAGES, segment, SCI_FLAG_LOCK_USER_MEM, &error));
    CHECK(own[0] == 0x31 && own[PAGES - 1] == 0x31); /* what was in it is still there */
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    TRY(SCIConnectSegment(scenario->sd, &remote, scenario->local, ID, 0, NULL, NULL, SOON, 0, &error));
    TRY(bytes = (volatile unsigned char *)SCIMapRemoteSegment(remote, &map, 0, PAGES, NULL, 0,
                                                              &error));
    CHECK(bytes[4096] == 0x31);
    own[4096] = 0x32;
    CHECK(bytes[4096] == 0x32);
    bytes[8192] = 0x33;
    CHECK(((volatile unsigned char *)own)[8192] == 0x33);
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(remote, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
    /* The memory stays the program's, with all that is in it. */
    CHECK(own[0] == 0x31 && own[4096] == 0x32 && own[8192] == 0x33);
    memset(own, 0, PAGES);
    CHECK(munmap(own, PAGES) == 0);
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    if (argc == 2 && strcmp(argv[1], "attacher") == 0)
        return attacher();
    scenario_begin(&scenario, argc, argv);
    shared(&scenario, argv[0]);
    owner_leaves(&scenario);
    registered(&scenario);
    scenario_end(&scenario);
    return 0;
}
