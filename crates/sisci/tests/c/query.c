/*
 * SCIQuery: every question has an answer of its form or is refused as illegal, and nothing is
 * written but the answer.
 */
#include "scenario.h"

#include <string.h>

static const unsigned int GUARD = 0xa5a5a5a5U;

/* The answer, and what lies behind it. */
static struct {
    unsigned int data;
    unsigned int behind;
} answer;

static void ask_adapter(unsigned int subcommand, unsigned int adapter, unsigned int port)
{
    sci_query_adapter_t query;
    query.localAdapterNo = adapter;
    query.portNo = port;
    query.subcommand = subcommand;
    query.data = &answer.data;
    answer.data = answer.behind = GUARD;
    SCIQuery(SCI_Q_ADAPTER, &query, 0, &error);
    CHECK(answer.behind == GUARD);
}

static void texts(void)
{
    static const unsigned int commands[] = {SCI_Q_API, SCI_Q_VENDORID, SCI_Q_SISCI_DRIVER_VERSION};
    char text[64], part[64];
    sci_query_string_t query;
    size_t i;
    for (i = 0; i < 3; i++) {
        memset(text, 'x', sizeof text);
        query.str = text;
        query.length = sizeof text;
        TRY(SCIQuery(commands[i], &query, 0, &error));
        CHECK(memchr(text, '\0', sizeof text) != NULL && text[0] != '\0');
        /* With little room, nothing is written behind it, and what is there is a text. */
        memset(part, 'x', sizeof part);
        query.str = part;
        query.length = 3;
        error = NOT_SET;
        SCIQuery(commands[i], &query, 0, &error);
        CHECK(error != NOT_SET && part[3] == 'x');
        if (error == SCI_ERR_OK)
            CHECK(memchr(part, '\0', 3) != NULL && strncmp(part, text, 2) == 0);
        query.length = 0;
        part[0] = 'x';
        SCIQuery(commands[i], &query, 0, &error);
        CHECK(part[0] == 'x');
    }
}

static void adapters(void)
{
    static const unsigned int known[] = {
        SCI_Q_ADAPTER_SERIAL_NUMBER,       SCI_Q_ADAPTER_CARD_TYPE,
        SCI_Q_ADAPTER_NODEID,              SCI_Q_ADAPTER_CONFIGURED,
        SCI_Q_ADAPTER_DMA_MTU,             SCI_Q_ADAPTER_MCAST_MAX_GROUPS,
        SCI_Q_ADAPTER_NUMBER_OF_LINKS,     SCI_Q_ADAPTER_LINK_OPERATIONAL,
        SCI_Q_ADAPTER_LINK_CABLE_INSERTED, SCI_Q_ADAPTER_LINK_ENABLED};
    /* Facts of hardware: where there is none, it is said so. */
    static const unsigned int of_hardware[] = {SCI_Q_ADAPTER_LINK_WIDTH, SCI_Q_ADAPTER_LINK_SPEED,
                                               SCI_Q_ADAPTER_LINK_UPTIME,
                                               SCI_Q_ADAPTER_LINK_DOWNTIME,
                                               SCI_Q_ADAPTER_LINK_PARTNER_PORT_NO};
    unsigned int node, adapter;
    size_t i;
    for (i = 0; i < sizeof known / sizeof known[0]; i++) {
        TRY(ask_adapter(known[i], 0, 0));
        CHECK(answer.data != GUARD);
        REFUSED(SCI_ERR_NO_SUCH_ADAPTERNO, ask_adapter(known[i], 1, 0));
        CHECK(answer.data == GUARD);
    }
    for (i = 0; i < sizeof of_hardware / sizeof of_hardware[0]; i++) {
        ask_adapter(of_hardware[i], 0, 0);
        CHECK(answer.data == GUARD ? error == SCI_ERR_NOT_SUPPORTED : error == SCI_ERR_OK);
    }
    TRY(SCIGetLocalNodeId(0, &node, 0, &error));
    TRY(ask_adapter(SCI_Q_ADAPTER_NODEID, 0, 0));
    CHECK(answer.data == node);
    TRY(ask_adapter(SCI_Q_ADAPTER_LINK_OPERATIONAL, 0, 0));
    CHECK(answer.data == 1);
    TRY(ask_adapter(SCI_Q_ADAPTER_NUMBER_OF_LINKS, 0, 0));
    CHECK(answer.data >= 1);
    TRY(ask_adapter(SCI_Q_ADAPTER_MCAST_MAX_GROUPS, 0, 0));
    CHECK(answer.data >= 4);
    TRY(ask_adapter(SCI_Q_ADAPTER_CARD_TYPE, 0, 0));
    CHECK(SCIGetAdapterTypeString(answer.data)[0] != '\0');
    CHECK(SCIGetAdapterFamilyString(answer.data)[0] != '\0');
    REFUSED(SCI_ERR_ILLEGAL_QUERY, ask_adapter(0xffff, 0, 0));
    REFUSED(SCI_ERR_ILLEGAL_QUERY, ask_adapter(5, 0, 0));
    for (adapter = 1; adapter < 4; adapter++)
        REFUSED(SCI_ERR_NO_SUCH_ADAPTERNO, ask_adapter(SCI_Q_ADAPTER_NODEID, adapter, 0));
}

/* Programs ask for it with two bytes of room. */
static void bus_number(void)
{
    unsigned short room[2] = {0, 0xa5a5};
    sci_query_adapter_t query;
    query.localAdapterNo = query.portNo = 0;
    query.subcommand = SCI_Q_ADAPTER_BDF;
    query.data = room;
    error = NOT_SET;
    SCIQuery(SCI_Q_ADAPTER, &query, 0, &error);
    CHECK(error != NOT_SET && room[1] == 0xa5a5);
}

static void system_and_engines(void)
{
    static const unsigned int engines[] = {SCI_FLAG_DMA_ADAPTER, SCI_FLAG_DMA_GLOBAL,
                                           SCI_FLAG_DMA_SYSDMA};
    sci_query_system_t query;
    sci_query_dma_t dma;
    sci_dma_capabilities_t capabilities[2];
    size_t i;
    query.subcommand = SCI_Q_SYSTEM_CPU_CACHE_LINE_SIZE;
    query.data = &answer.data;
    answer.behind = GUARD;
    TRY(SCIQuery(SCI_Q_SYSTEM, &query, 0, &error));
    CHECK(answer.behind == GUARD && answer.data >= 16 && (answer.data & (answer.data - 1)) == 0);
    query.subcommand = SCI_Q_ADAPTER_NODEID;
    REFUSED(SCI_ERR_ILLEGAL_QUERY, SCIQuery(SCI_Q_SYSTEM, &query, 0, &error));
    for (i = 0; i < 3; i++) {
        dma.localAdapterNo = 0;
        dma.subcommand = SCI_Q_DMA_AVAILABLE;
        dma.data = &answer.data;
        TRY(SCIQuery(SCI_Q_DMA, &dma, engines[i], &error));
        CHECK(answer.behind == GUARD && answer.data <= 1);
        if (answer.data == 0)
            continue;
        memset(capabilities, 0xa5, sizeof capabilities);
        dma.subcommand = SCI_Q_DMA_CAPABILITIES;
        dma.data = &capabilities[0];
        TRY(SCIQuery(SCI_Q_DMA, &dma, engines[i], &error));
        CHECK(capabilities[0].num_channels >= 1 && capabilities[0].max_transfer_size >= 4096);
        CHECK(capabilities[0].max_vector_length == DIS_DMA_MAX_VECLEN);
        CHECK(capabilities[0].min_align_bytes >= 1 && capabilities[0].support_mem2io == 1);
        CHECK(capabilities[1].num_channels == GUARD); /* nothing behind it */
    }
    REFUSED(SCI_ERR_ILLEGAL_QUERY, SCIQuery(0, &query, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_QUERY, SCIQuery(0xffffffffU, &query, 0, &error));
    REFUSED_SOMEHOW(SCIQuery(SCI_Q_ADAPTER, NULL, 0, &error));
}

static void segments(struct scenario *scenario)
{
    sci_local_segment_t local;
    sci_remote_segment_t remote;
    sci_map_t map;
    sci_query_local_segment_t of_local;
    sci_query_remote_segment_t of_remote;
    sci_query_map_t of_map;
    TRY(SCICreateSegment(scenario->sd, &local, 0x9e27, 8192, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(local, 0, 0, &error));
    TRY(SCISetSegmentAvailable(local, 0, 0, &error));
    TRY(SCIConnectSegment(scenario->sd, &remote, scenario->local, 0x9e27, 0, NULL, NULL, SOON, 0,
                          &error));
    TRY(SCIMapRemoteSegment(remote, &map, 4096, 4096, NULL, 0, &error));
    of_local.segment = local;
    of_local.subcommand = SCI_Q_LOCAL_SEGMENT_IOADDR;
    TRY(SCIQuery(SCI_Q_LOCAL_SEGMENT, &of_local, 0, &error));
    of_remote.segment = remote;
    of_remote.subcommand = SCI_Q_REMOTE_SEGMENT_IOADDR;
    TRY(SCIQuery(SCI_Q_REMOTE_SEGMENT, &of_remote, 0, &error));
    CHECK(of_local.data.ioaddr == of_remote.data.ioaddr);
    of_map.map = map;
    of_map.subcommand = SCI_Q_MAP_IOADDR;
    TRY(SCIQuery(SCI_Q_MAP, &of_map, 0, &error));
    CHECK(of_map.data == of_remote.data.ioaddr + 4096);
    of_map.subcommand = SCI_Q_MAP_PHYS_ADDR;
    TRY(SCIQuery(SCI_Q_MAP, &of_map, 0, &error));
    CHECK(of_map.data == SCIGetMapPhysAddr(map));
    of_map.subcommand = SCI_Q_MAP_MAPPED_TO_LOCAL_TARGET;
    TRY(SCIQuery(SCI_Q_MAP, &of_map, 0, &error));
    CHECK(of_map.data <= 1);
    /* A map is no remote segment, though a program asks as if it were: the subcommand counts. */
    of_map.subcommand = SCI_Q_MAP_IOADDR;
    of_map.data = 0;
    TRY(SCIQuery(SCI_Q_REMOTE_SEGMENT, &of_map, 0, &error));
    CHECK(of_map.data == of_remote.data.ioaddr + 4096);
    of_map.subcommand = SCI_Q_REMOTE_SEGMENT_IOADDR;
    REFUSED_SOMEHOW(SCIQuery(SCI_Q_REMOTE_SEGMENT, &of_map, 0, &error));
    of_local.subcommand = SCI_Q_REMOTE_SEGMENT_IOADDR;
    REFUSED_SOMEHOW(SCIQuery(SCI_Q_LOCAL_SEGMENT, &of_local, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(remote, 0, &error));
    TRY(SCIRemoveSegment(local, 0, &error));
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    scenario_begin(&scenario, argc, argv);
    texts();
    adapters();
    bus_number();
    system_and_engines();
    segments(&scenario);
    scenario_end(&scenario);
    return 0;
}
