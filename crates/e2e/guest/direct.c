/*
 * A drive that reads into a segment of another host, and writes from it, by direct I/O of a program that
 * has the segment mapped.
 *
 * usage: direct own WATCHERS       the segment's owner: waits until its memory has what the drive read, and
 *                                 until all watchers have seen it
 *        direct NODE DEVICE       in the guest that has the drive
 *        direct NODE watch WHICH  another one that has the segment mapped: the first is 1
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sisci_api.h"

enum { SEGMENT = 0xd12e, SIZE = 1 << 20, FROM = 64 << 10, TO = 512 << 10, LENGTH = 256 << 10, PATIENCE = 60000 };
/* Bytes of the segment that say: all have come, by who watches; the drive has read; it was seen, by watcher. */
enum { CAME = 16, READ = 0, SEEN = 32 };

static unsigned char pattern(size_t at) { return (unsigned char)(at * 7 + at / 251); }

static void fail(const char *what, sci_error_t error)
{
    fprintf(stderr, "%s: %s\n", what, error == SCI_ERR_OK ? "no" : SCIGetErrorString(error));
    exit(1);
}

static void await(volatile unsigned char *byte, const char *what)
{
    for (int waited = 0; *byte == 0; waited++) {
        if (waited == PATIENCE)
            fail(what, SCI_ERR_OK);
        usleep(1000);
    }
}

static void same(volatile unsigned char *bytes)
{
    for (size_t at = 0; at < LENGTH; at++)
        if (bytes[at] != pattern(at))
            fail("the segment has what the drive read", SCI_ERR_OK);
}

int main(int argc, char **argv)
{
    sci_error_t error;
    sci_desc_t sd;
    sci_map_t map;
    volatile unsigned char *bytes;
    int owns = argc == 3 && strcmp(argv[1], "own") == 0, watches = argc == 4, waited = 0;
    if (argc != 3 && !watches)
        return 2;
    SCIInitialize(0, &error);
    if (error == SCI_ERR_OK)
        SCIOpen(&sd, 0, &error);
    if (error != SCI_ERR_OK)
        fail("SCIOpen", error);
    if (owns) {
        sci_local_segment_t segment;
        SCICreateSegment(sd, &segment, SEGMENT, SIZE, NULL, NULL, 0, &error);
        if (error == SCI_ERR_OK)
            SCIPrepareSegment(segment, 0, 0, &error);
        if (error == SCI_ERR_OK)
            bytes = SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0, &error);
        if (error == SCI_ERR_OK)
            SCISetSegmentAvailable(segment, 0, 0, &error);
        if (error != SCI_ERR_OK)
            fail("a segment", error);
        for (int which = 1; which <= atoi(argv[2]); which++)
            await(bytes + CAME + which, "a watcher has the segment");
        bytes[CAME] = 1;
        await(bytes + READ, "the drive has read");
        same(bytes + TO);
        for (int which = 1; which <= atoi(argv[2]); which++)
            await(bytes + SEEN + which, "a watcher has seen it");
    } else {
        sci_remote_segment_t segment;
        int drive = watches ? 0 : open(argv[2], O_RDWR | O_DIRECT);
        if (drive < 0)
            fail(argv[2], SCI_ERR_OK);
        do {
            SCIConnectSegment(sd, &segment, (unsigned int)atoi(argv[1]), SEGMENT, 0, NULL, NULL, 1000, 0, &error);
            usleep(1000);
        } while (error == SCI_ERR_NO_SUCH_SEGMENT && ++waited < PATIENCE);
        if (error == SCI_ERR_OK)
            bytes = SCIMapRemoteSegment(segment, &map, 0, SIZE, NULL, 0, &error);
        if (error != SCI_ERR_OK)
            fail("the segment", error);
        if (watches) {
            bytes[CAME + atoi(argv[3])] = 1;
            await(bytes + READ, "the drive has read");
            same(bytes + TO);
            bytes[SEEN + atoi(argv[3])] = 1;
            SCITerminate();
            return 0;
        }
        await(bytes + CAME, "all watchers have the segment");
        for (size_t at = 0; at < LENGTH; at++)
            bytes[FROM + at] = pattern(at);
        if (pwrite(drive, (void *)(bytes + FROM), LENGTH, 4096) != LENGTH)
            fail("the drive writes from the segment", SCI_ERR_OK);
        if (pread(drive, (void *)(bytes + TO), LENGTH, 4096) != LENGTH)
            fail("the drive reads into the segment", SCI_ERR_OK);
        same(bytes + TO);
        bytes[READ] = 1;
    }
    SCITerminate();
    return 0;
}
