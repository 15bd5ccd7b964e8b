/*
 * Maps of another host's segment: any offset and size, several at once, hints that lead nowhere,
 * fixed addresses, and maps that cannot be stored to. The owner's memory shows what the peer
 * stored.
 */
#define _DEFAULT_SOURCE

#include "scenario.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ID = 0x3a95, SIZE = 3 * 4096 + 5 };

/* Programs map one byte, then the rest, into the same variable, and store unaligned words there. */
static void pieces(sci_remote_segment_t segment)
{
    sci_map_t map, first;
    volatile unsigned char *byte, *rest;
    int16_t word = 0x1234;
    TRY(byte = (volatile unsigned char *)SCIMapRemoteSegment(segment, &map, 0, 1, NULL, 0,
                                                             &error));
    first = map;
    TRY(rest = (volatile unsigned char *)SCIMapRemoteSegment(segment, &map, 1, SIZE - 1, NULL, 0,
                                                             &error));
    CHECK(first != map && SCIGetMapPointer(map) == rest && SCIGetMapPointer(first) == byte);
    byte[0] = 0x42;
    memcpy((void *)rest, &word, sizeof word);            /* bytes 1 and 2 */
    memcpy((void *)(rest + 4096), &word, sizeof word);   /* 4097 and 4098 */
    rest[SIZE - 2] = 0x99;                               /* the last one */
    CHECK(SCIGetMapPhysAddr(map) == SCIGetMapPhysAddr(first) + 1);
    TRY(SCIUnmapSegment(map, 0, &error));
    byte[0]++; /* the other map is still there */
    TRY(SCIUnmapSegment(first, 0, &error));
}

/* Maps of the same bytes show the same memory. */
static void several(sci_remote_segment_t segment)
{
    sci_map_t one, two;
    volatile unsigned char *first, *second;
    TRY(first = (volatile unsigned char *)SCIMapRemoteSegment(segment, &one, 100, 5000, NULL, 0,
                                                              &error));
    TRY(second = (volatile unsigned char *)SCIMapRemoteSegment(segment, &two, 4000, 4096, NULL, 0,
                                                               &error));
    first[4000] = 0x5a;
    CHECK(second[100] == 0x5a);
    second[101] = 0xa5;
    CHECK(first[4001] == 0xa5);
    TRY(SCIUnmapSegment(one, 0, &error));
    TRY(SCIUnmapSegment(two, 0, &error));
}

static void places(sci_remote_segment_t segment)
{
    sci_map_t map;
    volatile void *pointer;
    void *room;
    /* A hint may lead nowhere. */
    TRY(pointer = SCIMapRemoteSegment(segment, &map, 0, SIZE, (void *)0x12345, 0, &error));
    CHECK(pointer != NULL);
    TRY(SCIUnmapSegment(map, 0, &error));

    room = mmap(NULL, 4 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED && munmap(room, 4 * 4096) == 0);
    TRY(pointer = SCIMapRemoteSegment(segment, &map, 0, SIZE, room, SCI_FLAG_FIXED_MAP_ADDR,
                                      &error));
    CHECK(pointer == room);
    *(volatile unsigned char *)pointer = 0x43;
    TRY(SCIUnmapSegment(map, 0, &error));

    /* Never over what is there already. */
    room = mmap(NULL, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED);
    *(volatile unsigned char *)room = 0x77;
    error = NOT_SET;
    pointer = SCIMapRemoteSegment(segment, &map, 0, SIZE, room, SCI_FLAG_FIXED_MAP_ADDR, &error);
    CHECK(error == SCI_ERR_ILLEGAL_ADDRESS && pointer == NULL);
    CHECK(*(volatile unsigned char *)room == 0x77);
    CHECK(munmap(room, 4 * 4096) == 0);
    REFUSED(SCI_ERR_OFFSET_ALIGNMENT,
            SCIMapRemoteSegment(segment, &map, 0, SIZE, (void *)0x7000001,
                                SCI_FLAG_FIXED_MAP_ADDR, &error));
}

/* The kernel says whether memory can be stored to, without a signal. */
static int can_be_stored_to(volatile void *memory)
{
    int ends[2];
    ssize_t got;
    int reason;
    CHECK(pipe(ends) == 0 && write(ends[1], "x", 1) == 1);
    got = read(ends[0], (void *)memory, 1);
    reason = errno;
    close(ends[0]);
    close(ends[1]);
    CHECK(got == 1 || reason == EFAULT);
    return got == 1;
}

static void read_only(sci_remote_segment_t segment)
{
    sci_map_t map, writable;
    volatile unsigned char *bytes, *stored;
    unsigned char word[4] = {0x71, 0x72, 0x73, 0x74};
    TRY(bytes = (volatile unsigned char *)SCIMapRemoteSegment(segment, &map, 0, SIZE, NULL,
                                                              SCI_FLAG_READONLY_MAP, &error));
    TRY(stored = (volatile unsigned char *)SCIMapRemoteSegment(segment, &writable, 0, SIZE, NULL,
                                                               0, &error));
    stored[7] = 0x70;
    CHECK(bytes[7] == 0x70);
    CHECK(!can_be_stored_to(bytes + 8));
    CHECK(can_be_stored_to(stored + 8));
    REFUSED(SCI_ERR_ACCESS, SCIMemCpy(NULL, word, map, 16, sizeof word, 0, &error));
    REFUSED(SCI_ERR_ACCESS, SCITransferBlock(writable, 0, map, 16, 4, 0, &error));
    TRY(SCIMemCpy(NULL, word, writable, 16, sizeof word, 0, &error));
    word[0] = 0;
    TRY(SCIMemCpy(NULL, word, map, 16, sizeof word, SCI_FLAG_BLOCK_READ, &error));
    CHECK(word[0] == 0x71);
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIUnmapSegment(writable, 0, &error));
}

static void refusals(sci_remote_segment_t segment)
{
    sci_map_t map;
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIMapRemoteSegment(segment, &map, 0, SIZE + 1, NULL, 0, &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE, SCIMapRemoteSegment(segment, &map, SIZE, 1, NULL, 0, &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIMapRemoteSegment(segment, &map, (size_t)-1, 2, NULL, 0, &error));
    REFUSED(SCI_ERR_SIZE_ALIGNMENT, SCIMapRemoteSegment(segment, &map, 0, 0, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_FLAG,
            SCIMapRemoteSegment(segment, &map, 0, 1, NULL, 0x40000000, &error));
}

static void peer(struct scenario *scenario)
{
    /* What speaks of hardware buffers means nothing here, and is no mistake. */
    static const unsigned int meaningless[] = {SCI_FLAG_IO_MAP_IOSPACE, SCI_FLAG_NO_MEMORY_LOOPBACK,
                                               SCI_FLAG_SHARED_MAP, SCI_FLAG_LOCK_OPERATION,
                                               SCI_FLAG_READ_PREFETCH_NO_HOLD_MAP};
    sci_remote_segment_t segment;
    sci_map_t map;
    size_t i;
    scenario_meet(scenario);
    TRY(SCIConnectSegment(scenario->sd, &segment, scenario->peer, ID, 0, NULL, NULL, SOON, 0, &error));
    pieces(segment);
    scenario_meet(scenario); /* the owner looks */
    scenario_meet(scenario);
    several(segment);
    places(segment);
    read_only(segment);
    refusals(segment);
    for (i = 0; i < sizeof meaningless / sizeof meaningless[0]; i++) {
        TRY(SCIMapRemoteSegment(segment, &map, 0, SIZE, NULL, meaningless[i], &error));
        TRY(SCIUnmapSegment(map, 0, &error));
    }
    TRY(SCIDisconnectSegment(segment, 0, &error));
    scenario_meet(scenario);
}

static void owner(struct scenario *scenario)
{
    sci_local_segment_t segment;
    sci_map_t map, early;
    volatile unsigned char *bytes, *middle;
    TRY(SCICreateSegment(scenario->sd, &segment, ID, SIZE, NULL, NULL, 0, &error));
    /* Mapped before it is prepared. */
    TRY(bytes = (volatile unsigned char *)SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0,
                                                             &error));
    TRY(middle = (volatile unsigned char *)SCIMapLocalSegment(segment, &early, 4097, 3, NULL, 0,
                                                              &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIMapLocalSegment(segment, &map, 1, SIZE, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    scenario_meet(scenario);
    scenario_meet(scenario);
    CHECK(bytes[0] == 0x43 && bytes[1] == 0x34 && bytes[2] == 0x12 && bytes[3] == 0);
    CHECK(middle[0] == 0x34 && middle[1] == 0x12 && middle[2] == 0);
    CHECK(bytes[SIZE - 1] == 0x99 && bytes[SIZE - 2] == 0);
    scenario_meet(scenario);
    scenario_meet(scenario);
    TRY(SCIUnmapSegment(early, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    scenario_begin(&scenario, argc, argv);
    if (scenario.owner)
        owner(&scenario);
    else
        peer(&scenario);
    scenario_end(&scenario);
    return 0;
}
