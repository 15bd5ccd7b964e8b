/*
 * Two programs on two hosts write a number to each other's memory in turn, until one is told to end: what goes
 * on meanwhile, they are to notice nothing of. Each owns a segment and has the other's mapped.
 *
 * usage: exchange NODE               answers each number of NODE's program
 *        exchange NODE BEGUN END     asks; makes the file BEGUN after the first answer, and ends when the file
 *                                    END exists
 *
 * The one that asks prints how many answers came and how long the slowest took.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "sisci_api.h"

enum { ID = 0x3ab000, SIZE = 4096, LIMIT = 60, LAST = -1 };

static void fail(const char *what, sci_error_t error)
{
    fprintf(stderr, "%s: %s\n", what, SCIGetErrorString(error));
    exit(1);
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static volatile int32_t *own(sci_desc_t sd)
{
    sci_error_t error;
    sci_local_segment_t segment;
    sci_map_t map;
    volatile int32_t *word = NULL;
    SCICreateSegment(sd, &segment, ID, SIZE, NULL, NULL, 0, &error);
    if (error == SCI_ERR_OK)
        SCIPrepareSegment(segment, 0, 0, &error);
    if (error == SCI_ERR_OK)
        word = SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0, &error);
    if (error == SCI_ERR_OK)
        SCISetSegmentAvailable(segment, 0, 0, &error);
    if (error != SCI_ERR_OK)
        fail("a segment", error);
    return word;
}

static volatile int32_t *others(sci_desc_t sd, unsigned node)
{
    sci_error_t error;
    sci_remote_segment_t segment;
    sci_map_t map;
    volatile int32_t *word;
    double begun = now();
    do {
        SCIConnectSegment(sd, &segment, node, ID, 0, NULL, NULL, 1000, 0, &error);
        if (error == SCI_ERR_NO_SUCH_SEGMENT)
            usleep(10000);
    } while (error == SCI_ERR_NO_SUCH_SEGMENT && now() - begun < LIMIT);
    if (error != SCI_ERR_OK)
        fail("SCIConnectSegment", error);
    word = SCIMapRemoteSegment(segment, &map, 0, SIZE, NULL, 0, &error);
    if (error != SCI_ERR_OK)
        fail("SCIMapRemoteSegment", error);
    return word;
}

/* Waits for another number than this one. */
static int32_t next(volatile int32_t *word, int32_t last)
{
    double begun = now();
    int32_t read;
    for (unsigned long looked = 1; (read = *word) == last; looked++) {
        if (looked % 2000 != 0)
            continue;
        /* The other guest may need this processor. */
        usleep(50);
        if (now() - begun > LIMIT) {
            fprintf(stderr, "nothing came for %d s\n", LIMIT);
            exit(1);
        }
    }
    return read;
}

static void ask(volatile int32_t *mine, volatile int32_t *theirs, const char *begun, const char *end)
{
    double slowest = 0;
    int32_t number = 0;
    while (access(end, F_OK) != 0) {
        double at = now();
        *theirs = ++number;
        if (next(mine, number - 1) != number) {
            fprintf(stderr, "another answer than %d\n", (int)number);
            exit(1);
        }
        if (number == 1)
            close(open(begun, O_CREAT | O_WRONLY, 0644));
        if (now() - at > slowest)
            slowest = now() - at;
    }
    *theirs = LAST;
    next(mine, number);
    printf("%d answers, the slowest after %.0f us\n", (int)number, slowest * 1e6);
}

static void answer(volatile int32_t *mine, volatile int32_t *theirs)
{
    int32_t number = 0;
    do {
        number = next(mine, number);
        *theirs = number;
    } while (number != LAST);
}

int main(int argc, char **argv)
{
    sci_error_t error;
    sci_desc_t sd;
    if (argc != 2 && argc != 4)
        return 2;
    SCIInitialize(0, &error);
    if (error == SCI_ERR_OK)
        SCIOpen(&sd, 0, &error);
    if (error != SCI_ERR_OK)
        fail("SCIOpen", error);
    volatile int32_t *mine = own(sd), *theirs = others(sd, (unsigned)atoi(argv[1]));
    if (argc == 4)
        ask(mine, theirs, argv[2], argv[3]);
    else
        answer(mine, theirs);
    SCITerminate();
    return 0;
}
