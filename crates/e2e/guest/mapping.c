/*
 * What it costs to come to memory of another host: to connect to a segment, map it and store to it, and to
 * give it back; with others mapped meanwhile.
 *
 * usage: mapping own COUNT               the owner of COUNT segments, until it is told that all is done
 *        mapping NODE LOOPS LIVE [end]   connects to the first one LOOPS times, with LIVE others mapped, and
 *                                        tells the owner that all is done
 *
 * Prints a JSON object for each tenth of the loops: medians in microseconds, and the slowest loop.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sisci_api.h"

enum { FIRST = 0x3a9000, SIZE = 64 << 10, PATIENCE = 60000, PARTS = 10, STEPS = 5 };

static void fail(const char *what, sci_error_t error)
{
    fprintf(stderr, "%s: %s\n", what, SCIGetErrorString(error));
    exit(1);
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e6 + at.tv_nsec / 1e3;
}

static int compare(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double median(double *values, int count)
{
    qsort(values, count, sizeof *values, compare);
    return values[count / 2];
}

static void own(sci_desc_t sd, int count)
{
    sci_error_t error;
    volatile uint32_t *word = NULL;
    for (int i = 0; i < count; i++) {
        sci_local_segment_t segment;
        sci_map_t map;
        SCICreateSegment(sd, &segment, FIRST + i, SIZE, NULL, NULL, 0, &error);
        if (error == SCI_ERR_OK)
            SCIPrepareSegment(segment, 0, 0, &error);
        if (error == SCI_ERR_OK && i == 0)
            word = SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0, &error);
        if (error == SCI_ERR_OK)
            SCISetSegmentAvailable(segment, 0, 0, &error);
        if (error != SCI_ERR_OK)
            fail("a segment", error);
    }
    while (word[1] == 0)
        usleep(1000);
}

/* Connects and maps; what each step took. */
static sci_remote_segment_t come(sci_desc_t sd, unsigned node, int which, sci_map_t *map, volatile uint32_t **word,
                                 double *took)
{
    sci_error_t error;
    sci_remote_segment_t segment;
    double begun = now();
    for (int waited = 0;; waited++) {
        SCIConnectSegment(sd, &segment, node, FIRST + which, 0, NULL, NULL, 1000, 0, &error);
        if (error != SCI_ERR_NO_SUCH_SEGMENT || waited == PATIENCE)
            break;
        usleep(1000);
        begun = now();
    }
    if (error != SCI_ERR_OK)
        fail("SCIConnectSegment", error);
    double connected = now();
    *word = SCIMapRemoteSegment(segment, map, 0, SIZE, NULL, 0, &error);
    if (error != SCI_ERR_OK)
        fail("SCIMapRemoteSegment", error);
    double mapped = now();
    (*word)[2] = (uint32_t)which;
    double stored = now();
    took[0] = connected - begun, took[1] = mapped - connected, took[2] = stored - mapped, took[3] = stored - begun;
    return segment;
}

int main(int argc, char **argv)
{
    static const char *const names[STEPS] = {"connect", "map", "store", "first", "end"};
    sci_error_t error;
    sci_desc_t sd;
    if (argc < 3)
        return 2;
    SCIInitialize(0, &error);
    if (error == SCI_ERR_OK)
        SCIOpen(&sd, 0, &error);
    if (error != SCI_ERR_OK)
        fail("SCIOpen", error);
    if (strcmp(argv[1], "own") == 0) {
        own(sd, atoi(argv[2]));
        SCITerminate();
        return 0;
    }
    if (argc < 4)
        return 2;
    unsigned node = (unsigned)atoi(argv[1]);
    int loops = atoi(argv[2]), live = atoi(argv[3]), part = loops / PARTS > 0 ? loops / PARTS : 1;
    sci_map_t map;
    volatile uint32_t *word;
    double ignored[STEPS], *took[STEPS];
    for (int i = 1; i <= live; i++)
        come(sd, node, i, &map, &word, ignored);
    for (int step = 0; step < STEPS; step++)
        took[step] = calloc(part, sizeof(double));
    double worst = 0;
    for (int loop = 0; loop < loops; loop++) {
        double one[STEPS];
        sci_remote_segment_t segment = come(sd, node, 0, &map, &word, one);
        double begun = now();
        SCIUnmapSegment(map, 0, &error);
        if (error == SCI_ERR_OK)
            SCIDisconnectSegment(segment, 0, &error);
        if (error != SCI_ERR_OK)
            fail("SCIDisconnectSegment", error);
        one[4] = now() - begun;
        if (one[3] + one[4] > worst)
            worst = one[3] + one[4];
        for (int step = 0; step < STEPS; step++)
            took[step][loop % part] = one[step];
        if ((loop + 1) % part == 0) {
            printf("{\"loops\": %d, \"live\": %d", loop + 1, live);
            for (int step = 0; step < STEPS; step++)
                printf(", \"%s\": %.1f", names[step], median(took[step], part));
            printf(", \"worst\": %.1f}\n", worst);
            fflush(stdout);
            worst = 0;
        }
    }
    if (argc > 4) {
        come(sd, node, 0, &map, &word, ignored);
        word[1] = 1;
    }
    SCITerminate();
    return 0;
}
