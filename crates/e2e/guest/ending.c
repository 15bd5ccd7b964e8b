/*
 * A program that copies or connects while a process that it depends on ends.
 *
 * usage: ending own                    the owner of a segment, until it is killed
 *        ending NODE copy FILE         copies to that segment again and again
 *        ending NODE connect FILE      connects, maps, stores and gives back again and again
 *
 * FILE is made when that has been done once. It ends when something fails, and prints what did, how often nothing
 * had, and the longest of all calls, in milliseconds.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sisci_api.h"

enum { SEGMENT = 0xe4d, SIZE = 4 << 20, PATIENCE = 60000 };

static double longest, begun;

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e3 + at.tv_nsec / 1e6;
}

/* Times the calls between two of these. */
static void step(void)
{
    double at = now();
    if (begun != 0 && at - begun > longest)
        longest = at - begun;
    begun = at;
}

static void fail(const char *what, sci_error_t error)
{
    fprintf(stderr, "%s: %s\n", what, SCIGetErrorString(error));
    exit(1);
}

static void own(sci_desc_t sd)
{
    sci_error_t error;
    sci_local_segment_t segment;
    SCICreateSegment(sd, &segment, SEGMENT, SIZE, NULL, NULL, 0, &error);
    if (error == SCI_ERR_OK)
        SCIPrepareSegment(segment, 0, 0, &error);
    if (error == SCI_ERR_OK)
        SCISetSegmentAvailable(segment, 0, 0, &error);
    if (error != SCI_ERR_OK)
        fail("a segment", error);
    for (;;)
        pause();
}

static sci_error_t copy(sci_sequence_t sequence, sci_map_t map, void *bytes)
{
    sci_error_t error;
    sci_sequence_status_t status;
    SCIMemCpy(sequence, bytes, map, 0, SIZE, 0, &error);
    step();
    if (error != SCI_ERR_OK)
        return error;
    status = SCICheckSequence(sequence, 0, &error);
    step();
    return error == SCI_ERR_OK && status != SCI_SEQ_OK ? SCI_ERR_TRANSFER_FAILED : error;
}

static sci_error_t come(sci_desc_t sd, unsigned node, sci_remote_segment_t *segment, sci_map_t *map)
{
    sci_error_t error;
    volatile unsigned *word;
    SCIConnectSegment(sd, segment, node, SEGMENT, 0, NULL, NULL, 1000, 0, &error);
    step();
    if (error != SCI_ERR_OK)
        return error;
    word = SCIMapRemoteSegment(*segment, map, 0, SIZE, NULL, 0, &error);
    step();
    if (error != SCI_ERR_OK)
        return error;
    *word = 1;
    step();
    return SCI_ERR_OK;
}

static sci_error_t go(sci_remote_segment_t segment, sci_map_t map)
{
    sci_error_t error;
    SCIUnmapSegment(map, 0, &error);
    if (error == SCI_ERR_OK)
        SCIDisconnectSegment(segment, 0, &error);
    step();
    return error;
}

int main(int argc, char **argv)
{
    sci_error_t error;
    sci_desc_t sd;
    sci_remote_segment_t segment;
    sci_map_t map;
    sci_sequence_t sequence = NULL;
    int copies = argc == 4 && strcmp(argv[2], "copy") == 0;
    void *bytes = calloc(1, SIZE);
    if (bytes == NULL || (argc != 4 && argc != 2))
        return 2;
    SCIInitialize(0, &error);
    /* The node may be about to start again. */
    for (int waited = 0; waited < PATIENCE; waited++) {
        if (error == SCI_ERR_OK)
            SCIOpen(&sd, 0, &error);
        if (error == SCI_ERR_OK)
            break;
        usleep(1000);
        SCIInitialize(0, &error);
    }
    if (error != SCI_ERR_OK)
        fail("SCIOpen", error);
    if (argc == 2)
        own(sd);
    unsigned node = (unsigned)atoi(argv[1]);
    /* There may be no segment yet, and a node that was started again has yet to find the others. */
    for (int waited = 0; (error = come(sd, node, &segment, &map)) != SCI_ERR_OK; waited++) {
        if (waited == PATIENCE)
            fail("the segment", error);
        usleep(1000);
        begun = longest = 0;
    }
    if (copies)
        SCICreateMapSequence(map, &sequence, 0, &error);
    if (error != SCI_ERR_OK)
        fail("the segment", error);
    unsigned long done = 0;
    for (; error == SCI_ERR_OK; done++) {
        error = copies ? copy(sequence, map, bytes) : go(segment, map);
        if (error == SCI_ERR_OK && !copies)
            error = come(sd, node, &segment, &map);
        if (done == 0 && error == SCI_ERR_OK) {
            FILE *ready = fopen(argv[3], "w");
            if (ready == NULL)
                return 2;
            fclose(ready);
        }
    }
    printf("{\"error\": \"%s\", \"done\": %lu, \"longest\": %.1f}\n", SCIGetErrorString(error), done, longest);
    /* As a program that stops there: what it still has is given back by its end. */
    return 0;
}
