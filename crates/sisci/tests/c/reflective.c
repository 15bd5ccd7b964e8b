/*
 * Reflective memory: what is stored to a multicast group arrives in the segment of each host that
 * joined it. The sender need not have one itself.
 */
#include "scenario.h"

#include <string.h>

enum { GROUP = 3, OTHER = 5, SIZE = 2 << 20 };

static sci_local_segment_t join(struct scenario *scenario, unsigned int group, unsigned int flags,
                                sci_map_t *map, volatile unsigned char **bytes)
{
    sci_local_segment_t segment;
    TRY(SCICreateSegment(scenario->sd, &segment, group, SIZE, NULL, NULL, SCI_FLAG_BROADCAST, &error));
    TRY(SCIPrepareSegment(segment, 0, flags, &error));
    TRY(*bytes = (volatile unsigned char *)SCIMapLocalSegment(segment, map, 0, SIZE, NULL, flags,
                                                              &error));
    TRY(SCISetSegmentAvailable(segment, 0, flags, &error));
    return segment;
}

static void leave(sci_local_segment_t segment, sci_map_t map)
{
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
}

/* The way to everybody; whether the map says so again does not matter. */
static sci_remote_segment_t connect_to_all(struct scenario *scenario, unsigned int group,
                                           unsigned int flags, sci_map_t *map,
                                           volatile unsigned char **bytes)
{
    sci_remote_segment_t segment;
    POLL(SCI_ERR_NO_SUCH_SEGMENT,
         SCIConnectSegment(scenario->sd, &segment, DIS_BROADCAST_NODEID_GROUP_ALL, group, 0, NULL,
                           NULL, 0, SCI_FLAG_BROADCAST, &error));
    CHECK(SCIGetRemoteSegmentSize(segment) == SIZE);
    TRY(*bytes = (volatile unsigned char *)SCIMapRemoteSegment(segment, map, 0, SIZE, NULL, flags,
                                                               &error));
    return segment;
}

static void disconnect(sci_remote_segment_t segment, sci_map_t map)
{
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(segment, 0, &error));
}

/* The peer sends without a segment of its own; another group does not hear of it. */
static void one_way(struct scenario *scenario)
{
    sci_map_t map, other_map;
    volatile unsigned char *bytes, *other_bytes;
    if (scenario->owner) {
        sci_local_segment_t group = join(scenario, GROUP, SCI_FLAG_BROADCAST, &map, &bytes);
        sci_local_segment_t other = join(scenario, OTHER, 0, &other_map, &other_bytes);
        scenario_meet(scenario);
        scenario_meet(scenario);
        AWAIT(bytes[SIZE - 1] == 0x22);
        CHECK(bytes[0] == 0x11 && other_bytes[0] == 0 && other_bytes[SIZE - 1] == 0);
        scenario_meet(scenario);
        leave(group, map);
        leave(other, other_map);
    } else {
        sci_remote_segment_t group;
        scenario_meet(scenario);
        group = connect_to_all(scenario, GROUP, SCI_FLAG_BROADCAST, &map, &bytes);
        bytes[0] = 0x11;
        bytes[SIZE - 1] = 0x22;
        SCIFlush(NULL, 0);
        scenario_meet(scenario);
        scenario_meet(scenario);
        disconnect(group, map);
    }
    scenario_meet(scenario);
}

/* Both have a segment, and both store: each sees the other's bytes in its own memory. */
static void both_ways(struct scenario *scenario)
{
    enum { ROUNDS = 100 };
    unsigned int mine = scenario->owner ? 0 : 4096, others = scenario->owner ? 4096 : 0, i;
    sci_map_t map, remote_map;
    volatile unsigned char *bytes, *to_all;
    sci_local_segment_t segment = join(scenario, GROUP, 0, &map, &bytes);
    sci_remote_segment_t remote;
    scenario_meet(scenario); /* both have joined: nothing is missed from here on */
    remote = connect_to_all(scenario, GROUP, 0, &remote_map, &to_all);
    for (i = 1; i <= ROUNDS; i++) {
        memset((void *)(to_all + mine), (int)i, 512);
        SCIFlush(NULL, 0);
        AWAIT(bytes[others + 511] == i && bytes[others] == i);
        scenario_meet(scenario);
    }
    disconnect(remote, remote_map);
    leave(segment, map);
    scenario_meet(scenario);
}

/* The copy engine reaches a group, too. */
static void by_engine(struct scenario *scenario)
{
    sci_map_t map;
    volatile unsigned char *bytes;
    if (scenario->owner) {
        sci_local_segment_t segment = join(scenario, GROUP, 0, &map, &bytes);
        memset((void *)bytes, 0, SIZE); /* a group may keep what was stored to it before */
        scenario_meet(scenario);
        scenario_meet(scenario);
        AWAIT(bytes[100] == 0x5c && bytes[SIZE - 1] == 0x5c);
        CHECK(bytes[99] == 0);
        scenario_meet(scenario);
        leave(segment, map);
    } else {
        sci_local_segment_t source;
        sci_map_t source_map;
        volatile unsigned char *source_bytes;
        sci_remote_segment_t group;
        sci_dma_queue_t queue;
        scenario_meet(scenario);
        TRY(SCICreateSegment(scenario->sd, &source, 0x5c, SIZE, NULL, NULL, 0, &error));
        TRY(SCIPrepareSegment(source, 0, SCI_FLAG_DMA_SOURCE_ONLY, &error));
        TRY(source_bytes = (volatile unsigned char *)SCIMapLocalSegment(source, &source_map, 0,
                                                                        SIZE, NULL, 0, &error));
        memset((void *)source_bytes, 0x5c, SIZE);
        group = connect_to_all(scenario, GROUP, 0, &map, &bytes);
        TRY(SCICreateDMAQueue(scenario->sd, &queue, 0, 1, 0, &error));
        TRY(SCIStartDmaTransfer(queue, source, group, 100, SIZE - 100, 100, NULL, NULL,
                                SCI_FLAG_BROADCAST | SCI_FLAG_DMA_WAIT, &error));
        scenario_meet(scenario);
        scenario_meet(scenario);
        TRY(SCIRemoveDMAQueue(queue, 0, &error));
        disconnect(group, map);
        TRY(SCIUnmapSegment(source_map, 0, &error));
        TRY(SCIRemoveSegment(source, 0, &error));
    }
    scenario_meet(scenario);
}

/* A message to a number on every host that has it. */
static void messages(struct scenario *scenario)
{
    unsigned int number = 0x3e55;
    char text[8] = "";
    if (scenario->owner) {
        sci_local_data_interrupt_t interrupt;
        unsigned int length = sizeof text;
        TRY(SCICreateDataInterrupt(scenario->sd, &interrupt, 0, &number, NULL, NULL,
                                   SCI_FLAG_FIXED_INTNO | SCI_FLAG_BROADCAST, &error));
        scenario_meet(scenario);
        TRY(SCIWaitForDataInterrupt(interrupt, text, &length, SOON, 0, &error));
        CHECK(length == 6 && strcmp(text, "hello") == 0);
        TRY(SCIRemoveDataInterrupt(interrupt, 0, &error));
    } else {
        sci_remote_data_interrupt_t interrupt;
        scenario_meet(scenario);
        TRY(SCIConnectDataInterrupt(scenario->sd, &interrupt, DIS_BROADCAST_NODEID_GROUP_ALL, 0,
                                    number, SOON, SCI_FLAG_BROADCAST, &error));
        strcpy(text, "hello");
        TRY(SCITriggerDataInterrupt(interrupt, text, 6, 0, &error));
        TRY(SCIDisconnectDataInterrupt(interrupt, 0, &error));
    }
    scenario_meet(scenario);
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    scenario_begin(&scenario, argc, argv);
    one_way(&scenario);
    both_ways(&scenario);
    by_engine(&scenario);
    messages(&scenario);
    scenario_end(&scenario);
    return 0;
}
