/*
 * More memory of another host's than a guest's window has room for, at once: its kernel takes pieces back and maps
 * them again, and no store is lost or seen elsewhere.
 *
 * usage: window own MIBS            the owner, until all was stored and is as it should be
 *        window NODE MIBS           maps all of it, stores in each piece, and loads from each
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sisci_api.h"

enum { SEGMENT = 0x77d0, PIECE = 2 << 20, ROUNDS = 1, PATIENCE = 120000 };

static void fail(const char *what, sci_error_t error)
{
    fprintf(stderr, "%s: %s\n", what, error == SCI_ERR_OK ? "no" : SCIGetErrorString(error));
    exit(1);
}

static uint64_t value(size_t piece, int round) { return (piece + 1) * 0x9e3779b97f4a7c15u + (unsigned)round; }

/* The word of a piece that a round is about: not the first, which says that all is done. */
static volatile uint64_t *word(volatile unsigned char *bytes, size_t piece, int round)
{
    return (volatile uint64_t *)(bytes + piece * PIECE + 4096 * (1 + (unsigned)round) + 8 * (piece % 500));
}

static void check(volatile unsigned char *bytes, size_t pieces, int round, const char *where)
{
    for (size_t piece = 0; piece < pieces; piece++)
        if (*word(bytes, piece, round) != value(piece, round))
            fail(where, SCI_ERR_OK);
}

int main(int argc, char **argv)
{
    sci_error_t error;
    sci_desc_t sd;
    sci_map_t map;
    volatile unsigned char *bytes = NULL;
    if (argc != 3)
        return 2;
    size_t size = (size_t)atoi(argv[2]) << 20, pieces = size / PIECE;
    SCIInitialize(0, &error);
    if (error == SCI_ERR_OK)
        SCIOpen(&sd, 0, &error);
    if (error != SCI_ERR_OK)
        fail("SCIOpen", error);
    if (strcmp(argv[1], "own") == 0) {
        sci_local_segment_t segment;
        SCICreateSegment(sd, &segment, SEGMENT, size, NULL, NULL, 0, &error);
        if (error == SCI_ERR_OK)
            SCIPrepareSegment(segment, 0, 0, &error);
        if (error == SCI_ERR_OK)
            bytes = SCIMapLocalSegment(segment, &map, 0, size, NULL, 0, &error);
        if (error == SCI_ERR_OK)
            SCISetSegmentAvailable(segment, 0, 0, &error);
        if (error != SCI_ERR_OK)
            fail("a segment", error);
        for (int waited = 0; bytes[0] == 0; waited++) {
            if (waited == PATIENCE)
                fail("all was stored", SCI_ERR_OK);
            usleep(1000);
        }
        for (int round = 0; round < ROUNDS; round++)
            check(bytes, pieces, round, "the owner has what was stored");
    } else {
        sci_remote_segment_t segment;
        int waited = 0;
        do {
            SCIConnectSegment(sd, &segment, (unsigned)atoi(argv[1]), SEGMENT, 0, NULL, NULL, 1000, 0, &error);
            usleep(1000);
        } while (error == SCI_ERR_NO_SUCH_SEGMENT && ++waited < PATIENCE);
        if (error == SCI_ERR_OK)
            bytes = SCIMapRemoteSegment(segment, &map, 0, size, NULL, 0, &error);
        if (error != SCI_ERR_OK)
            fail("the segment", error);
        for (int round = 0; round < ROUNDS; round++) {
            for (size_t piece = 0; piece < pieces; piece++)
                *word(bytes, piece, round) = value(piece, round);
            check(bytes, pieces, round, "what was stored is loaded again");
        }
        bytes[0] = 1;
    }
    SCITerminate();
    return 0;
}
