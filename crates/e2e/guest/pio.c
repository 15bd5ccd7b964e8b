/*
 * Stores to memory of another host, and loads from it, against the same on memory of this machine.
 *
 * usage: pio own          the owner of the memory, until it is told that all is done
 *        pio NODE RUNS    measures, each size so many times in turns, and tells the owner that all is done
 *
 * Prints a JSON object for each size and direction: medians in MB/s, and of the ratios.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "sisci_api.h"

enum { SEGMENT = 0xb10, LARGEST = 16 << 20, SIZE = LARGEST + 4096, AMOUNT = 8 << 20, SMALL = 200000, MOST = 64 };
enum { HUGE = 2 << 20 };

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

/* MB/s of copies between memory and the program's own buffer; of the smallest size, of single stores or loads. */
static double move(void *memory, void *buffer, size_t bytes, int writes)
{
    size_t times = bytes <= 64 ? SMALL : AMOUNT / bytes + 1;
    double begun = now();
    for (size_t i = 0; i < times; i++) {
        if (bytes == sizeof(uint32_t) && writes)
            *(volatile uint32_t *)memory = (uint32_t)i;
        else if (bytes == sizeof(uint32_t))
            (void)*(volatile uint32_t *)memory;
        else if (writes)
            memcpy(memory, buffer, bytes);
        else
            memcpy(buffer, memory, bytes);
        __asm__ volatile("" ::: "memory");
    }
    return bytes * times / (now() - begun) / 1e6;
}

/*
 * In huge pages where the system has them: a segment is in such, and small ones would be slower. At this place in
 * its first huge page: an emulated processor keeps few translations for places that are the same in theirs, so what is
 * compared lies alike.
 */
static void *own_memory(size_t place)
{
    char *memory = mmap(NULL, SIZE + 2 * HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        exit(1);
    memory += HUGE - (uintptr_t)memory % HUGE;
    madvise(memory, SIZE + HUGE, MADV_HUGEPAGE);
    memory += place % HUGE;
    memset(memory, 1, SIZE);
    return memory;
}

int main(int argc, char **argv)
{
    sci_error_t error;
    sci_desc_t sd;
    sci_map_t map;
    if (argc < 2)
        return 2;
    SCIInitialize(0, &error);
    if (error == SCI_ERR_OK)
        SCIOpen(&sd, 0, &error);
    if (error != SCI_ERR_OK)
        fail("SCIOpen", error);
    if (strcmp(argv[1], "own") == 0) {
        sci_local_segment_t segment;
        volatile char *bytes = NULL;
        SCICreateSegment(sd, &segment, SEGMENT, SIZE, NULL, NULL, 0, &error);
        if (error == SCI_ERR_OK)
            SCIPrepareSegment(segment, 0, 0, &error);
        if (error == SCI_ERR_OK)
            bytes = SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0, &error);
        if (error == SCI_ERR_OK) {
            memset((void *)bytes, 0, SIZE);
            SCISetSegmentAvailable(segment, 0, 0, &error);
        }
        if (error != SCI_ERR_OK)
            fail("a segment", error);
        while (bytes[LARGEST] == 0)
            usleep(1000);
        SCITerminate();
        return 0;
    }
    sci_remote_segment_t segment;
    int runs = argc > 2 && atoi(argv[2]) < MOST ? atoi(argv[2]) : 5;
    do {
        SCIConnectSegment(sd, &segment, (unsigned)atoi(argv[1]), SEGMENT, 0, NULL, NULL, 1000, 0, &error);
        usleep(1000);
    } while (error == SCI_ERR_NO_SUCH_SEGMENT);
    char *remote = NULL;
    if (error == SCI_ERR_OK)
        remote = (char *)SCIMapRemoteSegment(segment, &map, 0, SIZE, NULL, 0, &error);
    if (error != SCI_ERR_OK)
        fail("the segment", error);
    char *local = own_memory((uintptr_t)remote), *buffer = own_memory((uintptr_t)remote + HUGE / 2);
    memset(remote, 0, LARGEST);
    for (size_t bytes = 4; bytes <= LARGEST; bytes *= bytes < 64 ? 16 : 8) {
        for (int writes = 1; writes >= 0; writes--) {
            double ours[MOST], peer[MOST], ratio[MOST];
            for (int run = 0; run < runs; run++) {
                ours[run] = move(remote, buffer, bytes, writes);
                peer[run] = move(local, buffer, bytes, writes);
                ratio[run] = ours[run] / peer[run];
            }
            printf("{\"what\": \"%s\", \"bytes\": %zu, \"ours\": %.2f, \"peer\": %.2f, \"ratio\": %.4f}\n",
                   writes ? "write" : "read", bytes, median(ours, runs), median(peer, runs), median(ratio, runs));
            fflush(stdout);
        }
    }
    remote[LARGEST] = 1;
    SCITerminate();
    return 0;
}
