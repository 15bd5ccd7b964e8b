/*
 * Initialising, descriptors, terminating, and what may be asked before: programs ask for node ids
 * while they read their options, and leave everything open when they end.
 */
#include "scenario.h"

#include <string.h>

static void errors_have_texts(void)
{
    unsigned int code;
    for (code = 0; code < 0x1000; code++) {
        CHECK(SCIGetErrorString((sci_error_t)code) != NULL);
        CHECK(SCIGetErrorString((sci_error_t)(code | SISCI_ERR_MASK)) != NULL);
        CHECK(SCIGetErrorString((sci_error_t)(code | SISCI_ERR_MASK))[0] != '\0');
    }
    CHECK(strcmp(SCIGetErrorString(SCI_ERR_BUSY), SCIGetErrorString(SCI_ERR_TIMEOUT)) != 0);
    CHECK(SCIGetAdapterTypeString(0xffffffffU) != NULL);
    CHECK(SCIGetAdapterFamilyString(0xffffffffU) != NULL);
}

static void before_initialising(void)
{
    dis_nodeId_list_t nodes;
    dis_virt_adapter_t type;
    unsigned int node = 0, available = 2;
    sci_query_adapter_t adapter;
    sci_query_dma_t dma;
    sci_desc_t sd;

    REFUSED(SCI_ERR_NOT_INITIALIZED, SCIOpen(&sd, 0, &error));
    adapter.localAdapterNo = 0;
    adapter.portNo = 0;
    adapter.subcommand = SCI_Q_ADAPTER_NODEID;
    adapter.data = &node;
    TRY(SCIQuery(SCI_Q_ADAPTER, &adapter, 0, &error));
    CHECK(node != 0);
    dma.localAdapterNo = 0;
    dma.subcommand = SCI_Q_DMA_AVAILABLE;
    dma.data = &available;
    TRY(SCIQuery(SCI_Q_DMA, &dma, SCI_FLAG_DMA_ADAPTER, &error));
    CHECK(available <= 1);

    memset(&nodes, 0xff, sizeof nodes);
    error = NOT_SET;
    SCIGetNodeIdByAdapterName("no host has this name", &nodes, &type, 0, &error);
    CHECK(error != NOT_SET && nodes[0] == 0 && nodes[1] == 0);
}

static void descriptors(void)
{
    sci_desc_t first, second;
    sci_local_segment_t segment;

    REFUSED(SCI_ERR_ILLEGAL_FLAG, SCIOpen(&first, 0x80000000U, &error));
    TRY(SCIOpen(&first, 0, &error));
    TRY(SCIOpen(&second, SCI_FLAG_THREAD_SAFE, &error));
    CHECK(first != NULL && second != NULL && first != second);
    TRY(SCICreateSegment(second, &segment, 0x11b, 64, NULL, NULL, 0, &error));
    TRY(SCIClose(first, 0, &error));
    REFUSED_SOMEHOW(SCIClose(first, 0, &error));
    /* What is left keeps a descriptor open, and whole. */
    REFUSED(SCI_ERR_BUSY, SCIClose(second, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
    TRY(SCIClose(second, 0, &error));
}

/* Terminating with everything open frees ids and numbers. */
static void leave_everything_open(void)
{
    sci_desc_t sd;
    sci_local_segment_t segment;
    sci_remote_segment_t remote;
    sci_map_t map, remote_map;
    sci_sequence_t sequence;
    sci_dma_queue_t queue;
    sci_local_interrupt_t interrupt;
    sci_local_data_interrupt_t data_interrupt;
    unsigned int node, number = 0x11b;

    TRY(SCIGetLocalNodeId(0, &node, 0, &error));
    TRY(SCIOpen(&sd, 0, &error));
    TRY(SCICreateSegment(sd, &segment, 0x11b, 4096, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCIMapLocalSegment(segment, &map, 0, 4096, NULL, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    TRY(SCIConnectSegment(sd, &remote, node, 0x11b, 0, NULL, NULL, SOON, 0, &error));
    TRY(SCIMapRemoteSegment(remote, &remote_map, 0, 4096, NULL, 0, &error));
    TRY(SCICreateMapSequence(remote_map, &sequence, 0, &error));
    TRY(SCICreateDMAQueue(sd, &queue, 0, 1, 0, &error));
    TRY(SCICreateInterrupt(sd, &interrupt, 0, &number, NULL, NULL, SCI_FLAG_FIXED_INTNO, &error));
    TRY(SCICreateDataInterrupt(sd, &data_interrupt, 0, &number, NULL, NULL, SCI_FLAG_FIXED_INTNO,
                               &error));
    SCITerminate();
}

static void adapters_and_nodes(void)
{
    sci_desc_t sd;
    unsigned int adapter, node;

    TRY(SCIOpen(&sd, 0, &error));
    TRY(SCIGetLocalNodeId(0, &node, 0, &error));
    CHECK(node != 0 && node < 256 && node != DIS_BROADCAST_NODEID_GROUP_ALL);
    for (adapter = 1; adapter < 4; adapter++) {
        unsigned int ignored;
        REFUSED(SCI_ERR_NO_SUCH_ADAPTERNO, SCIGetLocalNodeId(adapter, &ignored, 0, &error));
    }
    error = NOT_SET;
    CHECK(SCIProbeNode(sd, 0, node, 0, &error) != 0 && error == SCI_ERR_OK);
    error = NOT_SET;
    CHECK(SCIProbeNode(sd, 0, 3, 0, &error) == 0 && error != SCI_ERR_OK && error != NOT_SET);
    TRY(SCIClose(sd, 0, &error));
}

int main(void)
{
    errors_have_texts();
    before_initialising();
    REFUSED(SCI_ERR_ILLEGAL_FLAG, SCIInitialize(0x80000000U, &error));
    TRY(SCIInitialize(0, &error));
    TRY(SCIInitialize(0, &error)); /* libraries inside of a program may do it, too */
    descriptors();
    adapters_and_nodes();
    leave_everything_open();
    TRY(SCIInitialize(0, &error));
    leave_everything_open();
    SCITerminate(); /* once more does no harm */
    return 0;
}
