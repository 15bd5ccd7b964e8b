/* See story.h. */
#define _POSIX_C_SOURCE 200809L

#include "story.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 32, BOARD_BYTES = (SLOTS + 1) * 4, PATIENCE_S = 60 };

#ifdef __SANITIZE_THREAD__
unsigned int story_order;
#endif

/* The boards' ids: the two processes may be on one host, and other stories at the same time. */
static unsigned int board_id(unsigned int owner_node, unsigned int peer_node, int owners)
{
    return 0x57000000U | owner_node << 16 | peer_node << 8 | (owners ? 1U : 0U);
}

void story_fail(const char *file, int line, const char *format, ...)
{
    va_list arguments;
    printf("%s:%d: ", file, line);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(stdout);
    /* At once: callbacks may fail too, and what is left is the library's to clean up. */
    _exit(1);
}

void story_expect(const char *file, int line, const char *call, sci_error_t got,
                  sci_error_t wanted)
{
    if (got != wanted)
        story_fail(file, line, "%s answers 0x%x (%s) instead of 0x%x (%s)", call,
                   (unsigned int)got, got == NOT_SET ? "nothing" : SCIGetErrorString(got),
                   (unsigned int)wanted, SCIGetErrorString(wanted));
}

void story_pause(void)
{
    struct timespec moment;
    moment.tv_sec = 0;
    moment.tv_nsec = 100000;
    nanosleep(&moment, NULL);
}

static void find_other(struct story *story)
{
    unsigned int owner = story->owner ? story->local : story->peer;
    unsigned int peer = story->owner ? story->peer : story->local;
    TRY(SCICreateSegment(story->sd, &story->board, board_id(owner, peer, story->owner),
                         BOARD_BYTES, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(story->board, 0, 0, &error));
    TRY(story->heard = (volatile uint32_t *)SCIMapLocalSegment(
            story->board, &story->board_map, 0, BOARD_BYTES, NULL, 0, &error));
    TRY(SCISetSegmentAvailable(story->board, 0, 0, &error));
    POLL(SCI_ERR_NO_SUCH_SEGMENT,
         SCIConnectSegment(story->sd, &story->other_board, story->peer,
                           board_id(owner, peer, !story->owner), 0, NULL, NULL, 0, 0, &error));
    TRY(story->told = (volatile uint32_t *)SCIMapRemoteSegment(
            story->other_board, &story->other_map, 0, BOARD_BYTES, NULL, 0, &error));
}

void story_begin(struct story *story, int argc, char **argv)
{
    memset(story, 0, sizeof *story);
    alarm(PATIENCE_S); /* a story that hangs has failed */
    story->alone = argc == 1;
    if (!story->alone) {
        if (argc != 3 || (strcmp(argv[1], "owner") != 0 && strcmp(argv[1], "peer") != 0)) {
            fprintf(stderr, "usage: %s [owner|peer NODE_ID_OF_THE_OTHER]\n", argv[0]);
            exit(2);
        }
        story->owner = strcmp(argv[1], "owner") == 0;
        story->peer = (unsigned int)strtoul(argv[2], NULL, 0);
    }
    TRY(SCIInitialize(0, &error));
    TRY(SCIGetLocalNodeId(0, &story->local, 0, &error));
    TRY(SCIOpen(&story->sd, 0, &error));
    if (story->alone)
        story->peer = story->local;
    else
        find_other(story);
}

void story_end(struct story *story)
{
    if (!story->alone) {
        story_meet(story);
        TRY(SCIUnmapSegment(story->other_map, 0, &error));
        TRY(SCIDisconnectSegment(story->other_board, 0, &error));
        TRY(SCIUnmapSegment(story->board_map, 0, &error));
        TRY(SCIRemoveSegment(story->board, 0, &error));
    }
    TRY(SCIClose(story->sd, 0, &error));
    SCITerminate();
}

void story_meet(struct story *story)
{
    story->step++;
    CALLING(); /* what the other one does next may lead to callbacks, too */
    __atomic_store_n(&story->told[SLOTS], story->step, __ATOMIC_SEQ_CST);
    /* The other one may be a step ahead, as it need not wait for what comes after a meeting. */
    while (__atomic_load_n(&story->heard[SLOTS], __ATOMIC_SEQ_CST) < story->step) {
        sci_error_t ignored, status;
        if (SCIWaitForRemoteSegmentEvent(story->other_board, &status, 0, 0, &ignored) ==
                SCI_CB_LOST &&
            ignored == SCI_ERR_OK)
            story_fail(__FILE__, __LINE__, "the other process ended");
        story_pause();
    }
}

void story_tell(struct story *story, unsigned int slot, uint32_t value)
{
    story->told[slot] = value;
    story_meet(story);
}

uint32_t story_hear(struct story *story, unsigned int slot)
{
    story_meet(story);
    return story->heard[slot];
}
