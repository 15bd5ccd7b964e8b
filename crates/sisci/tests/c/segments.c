/*
 * Segments between two hosts: sizes from one byte, ids of 32 bits, who may connect and when, and
 * what is left to the other side when the owner removes one.
 */
#include "scenario.h"

/* A segment of the owner's, available. */
static sci_local_segment_t offer(struct scenario *scenario, unsigned int id, size_t size)
{
    sci_local_segment_t segment;
    TRY(SCICreateSegment(scenario->sd, &segment, id, size, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    return segment;
}

/* The owner makes a segment of that size; the peer stores at both of its ends. */
static void one_size(struct scenario *scenario, size_t size)
{
    unsigned int id = 0x00051e00;
    sci_map_t map;
    if (scenario->owner) {
        sci_local_segment_t segment = offer(scenario, id, size);
        volatile unsigned char *bytes;
        CHECK(SCIGetLocalSegmentSize(segment) == size);
        TRY(bytes = (volatile unsigned char *)SCIMapLocalSegment(segment, &map, 0, size, NULL, 0,
                                                                 &error));
        CHECK(bytes[0] == 0 && bytes[size / 2] == 0 && bytes[size - 1] == 0);
        scenario_meet(scenario); /* it can be connected to */
        scenario_meet(scenario); /* the peer has stored */
        CHECK(bytes[size - 1] == 0xe2 && (size == 1 || bytes[0] == 0xb1));
        scenario_meet(scenario); /* the peer has left */
        TRY(SCIUnmapSegment(map, 0, &error));
        TRY(SCIRemoveSegment(segment, 0, &error));
    } else {
        sci_remote_segment_t segment;
        volatile unsigned char *bytes;
        scenario_meet(scenario);
        TRY(SCIConnectSegment(scenario->sd, &segment, scenario->peer, id, 0, NULL, NULL, SOON, 0,
                              &error));
        CHECK(SCIGetRemoteSegmentSize(segment) == size);
        CHECK(SCIGetRemoteSegmentId(segment) == id);
        CHECK(SCIGetRemoteSegmentNodeId(segment) == scenario->peer);
        TRY(bytes = (volatile unsigned char *)SCIMapRemoteSegment(segment, &map, 0, size, NULL, 0,
                                                                  &error));
        bytes[0] = 0xb1;
        bytes[size - 1] = 0xe2;
        scenario_meet(scenario);
        TRY(SCIUnmapSegment(map, 0, &error));
        TRY(SCIDisconnectSegment(segment, 0, &error));
        scenario_meet(scenario);
    }
}

static void sizes(struct scenario *scenario)
{
    static const size_t all[] = {1, 4, 8, 4097, (3UL << 20) + 7, 1UL << 30 /* mostly unused */};
    size_t i;
    for (i = 0; i < sizeof all / sizeof all[0]; i++)
        one_size(scenario, all[i]);
}

/* Any 32 bits are an id, once on a host at a time. */
static void ids(struct scenario *scenario)
{
    static const unsigned int all[] = {0, 1, 0xba000001U, 0x04080001U, 0xffffffffU};
    sci_local_segment_t local[5], other;
    sci_remote_segment_t remote;
    size_t i;
    for (i = 0; i < 5; i++) {
        if (scenario->owner)
            local[i] = offer(scenario, all[i], 16);
    }
    scenario_meet(scenario);
    for (i = 0; i < 5; i++) {
        if (scenario->owner) {
            CHECK(SCIGetLocalSegmentId(local[i]) == all[i]);
            REFUSED(SCI_ERR_SEGMENTID_USED,
                    SCICreateSegment(scenario->sd, &other, all[i], 16, NULL, NULL, 0, &error));
        } else {
            TRY(SCIConnectSegment(scenario->sd, &remote, scenario->peer, all[i], 0, NULL, NULL, SOON, 0,
                                  &error));
            TRY(SCIDisconnectSegment(remote, 0, &error));
        }
    }
    scenario_meet(scenario);
    for (i = 0; i < 5; i++) {
        if (scenario->owner)
            TRY(SCIRemoveSegment(local[i], 0, &error));
    }
}

/* The library chooses ids that are free. */
static void chosen_ids(struct scenario *scenario)
{
    sci_local_segment_t first, second;
    TRY(SCICreateSegment(scenario->sd, &first, 0, 16, NULL, NULL, SCI_FLAG_AUTO_ID, &error));
    TRY(SCICreateSegment(scenario->sd, &second, 0, 16, NULL, NULL, SCI_FLAG_AUTO_ID, &error));
    CHECK(SCIGetLocalSegmentId(first) != SCIGetLocalSegmentId(second));
    TRY(SCIRemoveSegment(second, 0, &error));
    TRY(SCICreateSegment(scenario->sd, &second, SCIGetLocalSegmentId(first), 16, NULL, NULL,
                         SCI_FLAG_AUTO_ID, &error));
    CHECK(SCIGetLocalSegmentId(first) != SCIGetLocalSegmentId(second));
    TRY(SCIRemoveSegment(first, 0, &error));
    TRY(SCIRemoveSegment(second, 0, &error));
}

/* Nobody connects before it is available, or to what is private; a timeout of 0 tries once. */
static void availability(struct scenario *scenario)
{
    unsigned int id = 0x0a0a0a0a, private_id = 0x0a0a0a0b;
    sci_local_segment_t local, hidden;
    sci_remote_segment_t remote;
    if (scenario->owner) {
        scenario_meet(scenario); /* it does not exist */
        TRY(SCICreateSegment(scenario->sd, &local, id, 16, NULL, NULL, 0, &error));
        REFUSED(SCI_ERR_SEGMENT_NOT_PREPARED, SCISetSegmentAvailable(local, 0, 0, &error));
        TRY(SCIPrepareSegment(local, 0, 0, &error));
        TRY(SCICreateSegment(scenario->sd, &hidden, private_id, 16, NULL, NULL, SCI_FLAG_PRIVATE,
                             &error));
        TRY(SCIPrepareSegment(hidden, 0, 0, &error));
        REFUSED(SCI_ERR_ILLEGAL_OPERATION, SCISetSegmentAvailable(hidden, 0, 0, &error));
        scenario_meet(scenario);
        scenario_meet(scenario); /* it is not available */
        REFUSED(SCI_ERR_ILLEGAL_OPERATION, SCISetSegmentUnavailable(local, 0, 0, &error));
        TRY(SCISetSegmentAvailable(local, 0, 0, &error));
        scenario_meet(scenario);
        scenario_meet(scenario); /* the peer has connected */
        TRY(SCISetSegmentUnavailable(local, 0, 0, &error));
        REFUSED(SCI_ERR_ILLEGAL_OPERATION, SCISetSegmentUnavailable(local, 0, 0, &error));
        REFUSED(SCI_ERR_ILLEGAL_OPERATION,
                SCISetSegmentUnavailable(local, 0, SCI_FLAG_NOTIFY, &error));
        scenario_meet(scenario);
        scenario_meet(scenario); /* it is not available again */
        TRY(SCIRemoveSegment(local, 0, &error));
        TRY(SCIRemoveSegment(hidden, 0, &error));
        return;
    }
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT,
            SCIConnectSegment(scenario->sd, &remote, scenario->peer, id, 0, NULL, NULL, 0, 0, &error));
    scenario_meet(scenario);
    scenario_meet(scenario);
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT,
            SCIConnectSegment(scenario->sd, &remote, scenario->peer, id, 0, NULL, NULL, 0, 0, &error));
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT, SCIConnectSegment(scenario->sd, &remote, scenario->peer, private_id,
                                                       0, NULL, NULL, 0, 0, &error));
    scenario_meet(scenario);
    scenario_meet(scenario);
    POLL(SCI_ERR_NO_SUCH_SEGMENT,
         SCIConnectSegment(scenario->sd, &remote, scenario->peer, id, 0, NULL, NULL, 0, 0, &error));
    scenario_meet(scenario);
    scenario_meet(scenario);
    TRY(SCIDisconnectSegment(remote, 0, &error)); /* who was connected stayed so */
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT,
            SCIConnectSegment(scenario->sd, &remote, scenario->peer, id, 0, NULL, NULL, 0, 0, &error));
    scenario_meet(scenario);
}

/* The owner removes a segment that the peer has mapped: the peer lives on, and the id is free. */
static void removed_while_connected(struct scenario *scenario)
{
    unsigned int id = 0x0dead000;
    sci_remote_segment_t remote;
    sci_map_t map;
    if (scenario->owner) {
        sci_local_segment_t segment = offer(scenario, id, 8192);
        scenario_meet(scenario);
        scenario_meet(scenario); /* the peer has mapped it */
        TRY(SCIRemoveSegment(segment, 0, &error));
        REFUSED_SOMEHOW(SCIRemoveSegment(segment, 0, &error));
        segment = offer(scenario, id, 16);
        scenario_meet(scenario);
        scenario_meet(scenario);
        TRY(SCIRemoveSegment(segment, 0, &error));
    } else {
        volatile unsigned char *bytes;
        scenario_meet(scenario);
        TRY(SCIConnectSegment(scenario->sd, &remote, scenario->peer, id, 0, NULL, NULL, SOON, 0,
                              &error));
        TRY(bytes = (volatile unsigned char *)SCIMapRemoteSegment(remote, &map, 0, 8192, NULL, 0,
                                                                  &error));
        bytes[0] = 1;
        scenario_meet(scenario);
        scenario_meet(scenario); /* it is removed: neither of these ends the program */
        bytes[0] = 2;
        bytes[8191] = bytes[4096];
        TRY(SCIUnmapSegment(map, 0, &error));
        TRY(SCIDisconnectSegment(remote, 0, &error));
        scenario_meet(scenario);
    }
}

/* What is in use stays; bad sizes, flags, nodes and adapters are refused. */
static void refusals(struct scenario *scenario)
{
    sci_local_segment_t local;
    sci_remote_segment_t remote;
    sci_map_t map;
    REFUSED(SCI_ERR_SIZE_ALIGNMENT,
            SCICreateSegment(scenario->sd, &local, 7, 0, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_FLAG,
            SCICreateSegment(scenario->sd, &local, 7, 16, NULL, NULL, 0x08000000, &error));
    REFUSED_SOMEHOW(SCICreateSegment(scenario->sd, &local, 7, (size_t)-1, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_NO_SUCH_NODEID, SCIConnectSegment(scenario->sd, &remote, 3, 7, 0, NULL, NULL, 0,
                                                      0, &error));
    REFUSED(SCI_ERR_NO_SUCH_ADAPTERNO, SCIConnectSegment(scenario->sd, &remote, scenario->peer, 7, 1,
                                                         NULL, NULL, 0, 0, &error));
    TRY(SCICreateSegment(scenario->sd, &local, 7, 16, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_NO_SUCH_ADAPTERNO, SCIPrepareSegment(local, 1, 0, &error));
    TRY(SCIPrepareSegment(local, 0, 0, &error));
    TRY(SCISetSegmentAvailable(local, 0, 0, &error));
    TRY(SCIMapLocalSegment(local, &map, 0, 16, NULL, 0, &error));
    REFUSED(SCI_ERR_BUSY, SCIRemoveSegment(local, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    /* A host connects to its own segments, too. */
    TRY(SCIConnectSegment(scenario->sd, &remote, SCI_LOCAL_HOST, 7, 0, NULL, NULL, SOON, 0, &error));
    TRY(SCIMapRemoteSegment(remote, &map, 0, 16, NULL, 0, &error));
    REFUSED(SCI_ERR_BUSY, SCIDisconnectSegment(remote, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(remote, 0, &error));
    TRY(SCIRemoveSegment(local, 0, &error));
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    scenario_begin(&scenario, argc, argv);
    sizes(&scenario);
    ids(&scenario);
    availability(&scenario);
    removed_while_connected(&scenario);
    if (scenario.owner) {
        chosen_ids(&scenario);
        refusals(&scenario);
    }
    scenario_end(&scenario);
    return 0;
}
