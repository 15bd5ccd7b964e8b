/*
 * Reflective memory: what is stored to a multicast group arrives in the segment of each host that
 * joined it. The sender need not have one itself.
 */
#include "story.h"

#include <string.h>

enum { GROUP = 3, OTHER = 5, SIZE = 2 << 20 };

static sci_local_segment_t join(struct story *story, unsigned int group, unsigned int flags,
                                sci_map_t *map, volatile unsigned char **bytes)
{
    sci_local_segment_t segment;
    TRY(SCICreateSegment(story->sd, &segment, group, SIZE, NULL, NULL, SCI_FLAG_BROADCAST, &error));
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
static sci_remote_segment_t connect_to_all(struct story *story, unsigned int group,
                                           unsigned int flags, sci_map_t *map,
                                           volatile unsigned char **bytes)
{
    sci_remote_segment_t segment;
    POLL(SCI_ERR_NO_SUCH_SEGMENT,
         SCIConnectSegment(story->sd, &segment, DIS_BROADCAST_NODEID_GROUP_ALL, group, 0, NULL,
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
static void one_way(struct story *story)
{
    sci_map_t map, other_map;
    volatile unsigned char *bytes, *other_bytes;
    if (story->owner) {
        sci_local_segment_t group = join(story, GROUP, SCI_FLAG_BROADCAST, &map, &bytes);
        sci_local_segment_t other = join(story, OTHER, 0, &other_map, &other_bytes);
        story_meet(story);
        story_meet(story);
        AWAIT(bytes[SIZE - 1] == 0x22);
        CHECK(bytes[0] == 0x11 && other_bytes[0] == 0 && other_bytes[SIZE - 1] == 0);
        story_meet(story);
        leave(group, map);
        leave(other, other_map);
    } else {
        sci_remote_segment_t group;
        story_meet(story);
        group = connect_to_all(story, GROUP, SCI_FLAG_BROADCAST, &map, &bytes);
        bytes[0] = 0x11;
        bytes[SIZE - 1] = 0x22;
        SCIFlush(NULL, 0);
        story_meet(story);
        story_meet(story);
        disconnect(group, map);
    }
    story_meet(story);
}

/* Both have a segment, and both store: each sees the other's bytes in its own memory. */
static void both_ways(struct story *story)
{
    enum { ROUNDS = 100 };
    unsigned int mine = story->owner ? 0 : 4096, others = story->owner ? 4096 : 0, i;
    sci_map_t map, remote_map;
    volatile unsigned char *bytes, *to_all;
    sci_local_segment_t segment = join(story, GROUP, 0, &map, &bytes);
    sci_remote_segment_t remote;
    story_meet(story); /* both have joined: nothing is missed from here on */
    remote = connect_to_all(story, GROUP, 0, &remote_map, &to_all);
    for (i = 1; i <= ROUNDS; i++) {
        memset((void *)(to_all + mine), (int)i, 512);
        SCIFlush(NULL, 0);
        AWAIT(bytes[others + 511] == i && bytes[others] == i);
        story_meet(story);
    }
    disconnect(remote, remote_map);
    leave(segment, map);
    story_meet(story);
}

/* The copy engine reaches a group, too. */
static void by_engine(struct story *story)
{
    sci_map_t map;
    volatile unsigned char *bytes;
    if (story->owner) {
        sci_local_segment_t segment = join(story, GROUP, 0, &map, &bytes);
        memset((void *)bytes, 0, SIZE); /* a group may keep what was stored to it before */
        story_meet(story);
        story_meet(story);
        AWAIT(bytes[100] == 0x5c && bytes[SIZE - 1] == 0x5c);
        CHECK(bytes[99] == 0);
        story_meet(story);
        leave(segment, map);
    } else {
        sci_local_segment_t source;
        sci_map_t source_map;
        volatile unsigned char *source_bytes;
        sci_remote_segment_t group;
        sci_dma_queue_t queue;
        story_meet(story);
        TRY(SCICreateSegment(story->sd, &source, 0x5c, SIZE, NULL, NULL, 0, &error));
        TRY(SCIPrepareSegment(source, 0, SCI_FLAG_DMA_SOURCE_ONLY, &error));
        TRY(source_bytes = (volatile unsigned char *)SCIMapLocalSegment(source, &source_map, 0,
                                                                        SIZE, NULL, 0, &error));
        memset((void *)source_bytes, 0x5c, SIZE);
        group = connect_to_all(story, GROUP, 0, &map, &bytes);
        TRY(SCICreateDMAQueue(story->sd, &queue, 0, 1, 0, &error));
        TRY(SCIStartDmaTransfer(queue, source, group, 100, SIZE - 100, 100, NULL, NULL,
                                SCI_FLAG_BROADCAST | SCI_FLAG_DMA_WAIT, &error));
        story_meet(story);
        story_meet(story);
        TRY(SCIRemoveDMAQueue(queue, 0, &error));
        disconnect(group, map);
        TRY(SCIUnmapSegment(source_map, 0, &error));
        TRY(SCIRemoveSegment(source, 0, &error));
    }
    story_meet(story);
}

/* A message to a number on every host that has it. */
static void messages(struct story *story)
{
    unsigned int number = 0x3e55;
    char text[8] = "";
    if (story->owner) {
        sci_local_data_interrupt_t interrupt;
        unsigned int length = sizeof text;
        TRY(SCICreateDataInterrupt(story->sd, &interrupt, 0, &number, NULL, NULL,
                                   SCI_FLAG_FIXED_INTNO | SCI_FLAG_BROADCAST, &error));
        story_meet(story);
        TRY(SCIWaitForDataInterrupt(interrupt, text, &length, SOON, 0, &error));
        CHECK(length == 6 && strcmp(text, "hello") == 0);
        TRY(SCIRemoveDataInterrupt(interrupt, 0, &error));
    } else {
        sci_remote_data_interrupt_t interrupt;
        story_meet(story);
        TRY(SCIConnectDataInterrupt(story->sd, &interrupt, DIS_BROADCAST_NODEID_GROUP_ALL, 0,
                                    number, SOON, SCI_FLAG_BROADCAST, &error));
        strcpy(text, "hello");
        TRY(SCITriggerDataInterrupt(interrupt, text, 6, 0, &error));
        TRY(SCIDisconnectDataInterrupt(interrupt, 0, &error));
    }
    story_meet(story);
}

int main(int argc, char **argv)
{
    struct story story;
    story_begin(&story, argc, argv);
    one_way(&story);
    both_ways(&story);
    by_engine(&story);
    messages(&story);
    story_end(&story);
    return 0;
}
