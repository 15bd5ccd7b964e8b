/*
 * Handles that are not valid: none, numbers that were never one, those of another kind, and those
 * of what was removed. Every function refuses them with an error, and none looks at where they
 * lead.
 */
#include "scenario.h"

/* Calls everything that takes a kind of handle with one that is not of it. */
typedef void (*misuse)(void *handle);

static unsigned int number;
static size_t size;
static char bytes[64];

static void as_descriptor(void *handle)
{
    sci_desc_t sd = (sci_desc_t)handle;
    sci_local_segment_t local;
    sci_remote_segment_t remote;
    sci_dma_queue_t queue;
    sci_dma_channel_t channel;
    sci_local_interrupt_t interrupt;
    sci_remote_interrupt_t remote_interrupt;
    sci_local_data_interrupt_t data;
    sci_remote_data_interrupt_t remote_data;
    REFUSED_SOMEHOW(SCIClose(sd, 0, &error));
    REFUSED_SOMEHOW(SCICreateSegment(sd, &local, 0x4a, 64, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIAttachLocalSegment(sd, &local, 0x4a, &size, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIConnectSegment(sd, &remote, SCI_LOCAL_HOST, 0x4a, 0, NULL, NULL, 0, 0,
                                      &error));
    REFUSED_SOMEHOW(SCICreateDMAQueue(sd, &queue, 0, 1, 0, &error));
    REFUSED_SOMEHOW(SCIRequestDMAChannel(sd, &channel, 0, SCI_DMA_TYPE_DONTCARE,
                                         SCI_DMA_CHANNEL_ID_DONTCARE, 0, &error));
    REFUSED_SOMEHOW(SCICreateInterrupt(sd, &interrupt, 0, &number, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIConnectInterrupt(sd, &remote_interrupt, SCI_LOCAL_HOST, 0, 0, 0, 0,
                                        &error));
    REFUSED_SOMEHOW(SCICreateDataInterrupt(sd, &data, 0, &number, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIConnectDataInterrupt(sd, &remote_data, SCI_LOCAL_HOST, 0, 0, 0, 0,
                                            &error));
    error = NOT_SET;
    CHECK(SCIProbeNode(sd, 0, 4, 0, &error) == 0 && error != SCI_ERR_OK);
}

static void as_local_segment(void *handle)
{
    sci_local_segment_t segment = (sci_local_segment_t)handle;
    sci_map_t map;
    sci_query_local_segment_t query;
    REFUSED_SOMEHOW(SCIPrepareSegment(segment, 0, 0, &error));
    error = NOT_SET;
    CHECK(SCIMapLocalSegment(segment, &map, 0, 1, NULL, 0, &error) == NULL && error != SCI_ERR_OK);
    REFUSED_SOMEHOW(SCISetSegmentAvailable(segment, 0, 0, &error));
    REFUSED_SOMEHOW(SCISetSegmentUnavailable(segment, 0, 0, &error));
    REFUSED_SOMEHOW(SCIRemoveSegment(segment, 0, &error));
    REFUSED_SOMEHOW(SCIShareSegment(segment, 0, &error));
    REFUSED_SOMEHOW(SCIWaitForLocalSegmentEvent(segment, &number, &number, 0, 0, &error));
    REFUSED_SOMEHOW(SCIRegisterSegmentMemory(bytes, sizeof bytes, segment, 0, &error));
    CHECK(SCIGetLocalSegmentSize(segment) == 0 && SCIGetLocalSegmentId(segment) == 0);
    query.segment = segment;
    query.subcommand = SCI_Q_LOCAL_SEGMENT_IOADDR;
    REFUSED_SOMEHOW(SCIQuery(SCI_Q_LOCAL_SEGMENT, &query, 0, &error));
}

static sci_remote_segment_t disconnected[2];

static int was_connected(sci_remote_segment_t segment)
{
    return segment != NULL && (segment == disconnected[0] || segment == disconnected[1]);
}

static void as_remote_segment(void *handle)
{
    sci_remote_segment_t segment = (sci_remote_segment_t)handle;
    sci_map_t map;
    sci_error_t status;
    sci_query_remote_segment_t query;
    REFUSED_SOMEHOW(SCIDisconnectSegment(segment, 0, &error));
    error = NOT_SET;
    CHECK(SCIMapRemoteSegment(segment, &map, 0, 1, NULL, 0, &error) == NULL);
    CHECK(error != SCI_ERR_OK && error != NOT_SET);
    REFUSED_SOMEHOW(SCIWaitForRemoteSegmentEvent(segment, &status, 0, 0, &error));
    CHECK(SCIGetRemoteSegmentSize(segment) == 0);
    /* What a connection was to is known after its end: programs ask. */
    CHECK(SCIGetRemoteSegmentId(segment) == (was_connected(segment) ? 0x4a4a : 0));
    CHECK((SCIGetRemoteSegmentNodeId(segment) != 0) == was_connected(segment));
    query.segment = segment;
    query.subcommand = SCI_Q_REMOTE_SEGMENT_IOADDR;
    REFUSED_SOMEHOW(SCIQuery(SCI_Q_REMOTE_SEGMENT, &query, 0, &error));
}

static void as_map(void *handle)
{
    sci_map_t map = (sci_map_t)handle;
    sci_sequence_t sequence;
    sci_query_map_t query;
    REFUSED_SOMEHOW(SCIUnmapSegment(map, 0, &error));
    REFUSED_SOMEHOW(SCICreateMapSequence(map, &sequence, 0, &error));
    REFUSED_SOMEHOW(SCIMemCpy(NULL, bytes, map, 0, 8, 0, &error));
    REFUSED_SOMEHOW(SCIMemCopy(bytes, map, 0, 8, 0, &error));
    REFUSED_SOMEHOW(SCITransferBlock(map, 0, map, 0, 8, 0, &error));
    CHECK(SCIGetMapPointer(map) == NULL && SCIGetMapPhysAddr(map) == 0);
    query.map = map;
    query.subcommand = SCI_Q_MAP_IOADDR;
    REFUSED_SOMEHOW(SCIQuery(SCI_Q_MAP, &query, 0, &error));
}

static void as_sequence(void *handle)
{
    sci_sequence_t sequence = (sci_sequence_t)handle;
    REFUSED_SOMEHOW(SCIRemoveSequence(sequence, 0, &error));
    error = NOT_SET;
    CHECK(SCIStartSequence(sequence, 0, &error) != SCI_SEQ_OK && error != SCI_ERR_OK);
    error = NOT_SET;
    CHECK(SCICheckSequence(sequence, 0, &error) != SCI_SEQ_OK && error != SCI_ERR_OK);
    SCIFlush(sequence, 0);
    SCIStoreBarrier(sequence, 0);
    SCIFlushReadBuffers(sequence);
}

static void as_queue(void *handle)
{
    sci_dma_queue_t queue = (sci_dma_queue_t)handle;
    dis_dma_vec_t piece = {1, 0, 0, 0};
    REFUSED_SOMEHOW(SCIRemoveDMAQueue(queue, 0, &error));
    REFUSED_SOMEHOW(SCIAbortDMAQueue(queue, 0, &error));
    REFUSED_SOMEHOW(SCIWaitForDMAQueue(queue, 0, 0, &error));
    REFUSED_SOMEHOW(SCIResetDMAQueue(queue, 0, &error));
    REFUSED_SOMEHOW(SCIPostDMAQueue(queue, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIStartDmaTransfer(queue, NULL, NULL, 0, 1, 0, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIStartDmaTransferMem(queue, bytes, NULL, 1, 0, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIStartDmaTransferVec(queue, NULL, NULL, 1, &piece, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIEnqueueDMATransfer(queue, NULL, NULL, 0, 0, 1, 0, &error));
    CHECK((int)SCIDMAQueueState(queue) >= 0);
}

static void as_channel(void *handle)
{
    REFUSED_SOMEHOW(SCIReturnDMAChannel((sci_dma_channel_t)handle, &error));
    REFUSED_SOMEHOW(SCIAssignDMAChannel((sci_dma_channel_t)handle, NULL, 0, &error));
}

static void as_interrupt(void *handle)
{
    sci_local_interrupt_t interrupt = (sci_local_interrupt_t)handle;
    REFUSED_SOMEHOW(SCIRemoveInterrupt(interrupt, 0, &error));
    REFUSED_SOMEHOW(SCIWaitForInterrupt(interrupt, 0, 0, &error));
    REFUSED_SOMEHOW(SCIEnableConditionalInterrupt(interrupt, 0, &error));
    REFUSED_SOMEHOW(SCIDisableConditionalInterrupt(interrupt, 0, &error));
    REFUSED_SOMEHOW(SCIGetConditionalInterruptTrigCounter(interrupt, &number, 0, &error));
}

static void as_remote_interrupt(void *handle)
{
    REFUSED_SOMEHOW(SCIDisconnectInterrupt((sci_remote_interrupt_t)handle, 0, &error));
    REFUSED_SOMEHOW(SCITriggerInterrupt((sci_remote_interrupt_t)handle, 0, &error));
}

static void as_data_interrupt(void *handle)
{
    sci_local_data_interrupt_t interrupt = (sci_local_data_interrupt_t)handle;
    unsigned int length = sizeof bytes;
    REFUSED_SOMEHOW(SCIRemoveDataInterrupt(interrupt, 0, &error));
    REFUSED_SOMEHOW(SCIWaitForDataInterrupt(interrupt, bytes, &length, 0, 0, &error));
}

static void as_remote_data_interrupt(void *handle)
{
    sci_remote_data_interrupt_t interrupt = (sci_remote_data_interrupt_t)handle;
    REFUSED_SOMEHOW(SCIDisconnectDataInterrupt(interrupt, 0, &error));
    REFUSED_SOMEHOW(SCITriggerDataInterrupt(interrupt, bytes, 8, 0, &error));
}

static void as_block(void *handle)
{
    REFUSED_SOMEHOW(SCIWaitForBlockTransfer((sci_block_transfer_t)handle, 0, 0, &error));
    REFUSED_SOMEHOW(SCIAbortBlockTransfer((sci_block_transfer_t)handle, 0, &error));
}

static void as_device(void *handle)
{
    sci_smartio_device_t device = (sci_smartio_device_t)handle;
    sci_remote_segment_t segment;
    REFUSED_SOMEHOW(SCIReturnDevice(device, 0, &error));
    REFUSED_SOMEHOW(SCIReleaseExclusiveBorrow(device, 0, &error));
    REFUSED_SOMEHOW(SCIConnectDeviceSegment(device, &segment, 0, SCI_MEMTYPE_BAR, NULL, NULL, 0,
                                            &error));
    REFUSED_SOMEHOW(SCICreateDeviceSegment(device, 1, 64, SCI_MEMTYPE_SHARED,
                                           SCI_MEMACCESS_HOST_READ, 0, &error));
    CHECK(SCIGetFabricDeviceId(device) == 0);
}

enum { KINDS = 13 };
static const misuse MISUSES[KINDS] = {
    as_descriptor,     as_local_segment,         as_remote_segment,
    as_map,            as_sequence,              as_queue,
    as_channel,        as_interrupt,             as_remote_interrupt,
    as_data_interrupt, as_remote_data_interrupt, as_block,
    as_device,
};

static void misuse_all(void *handle, int but_for)
{
    int kind;
    for (kind = 0; kind < KINDS; kind++)
        if (kind != but_for)
            MISUSES[kind](handle);
}

static void never_handles(void)
{
    static char zeroes[4096];
    size_t i;
    void *const never[] = {NULL,
                           (void *)(uintptr_t)1,
                           (void *)(uintptr_t)8,
                           (void *)(uintptr_t)0x1000,
                           (void *)(uintptr_t)0xdeadbeefU,
                           (void *)(uintptr_t)0x7fffdeadbeefULL,
                           (void *)(uintptr_t)0x8000000000000000ULL,
                           (void *)UINTPTR_MAX,
                           zeroes,
                           zeroes + 3};
    for (i = 0; i < sizeof never / sizeof never[0]; i++)
        misuse_all(never[i], -1);
}

/* One of each kind, in the order of MISUSES; blocks and devices are left out. */
struct things {
    sci_desc_t sd;
    sci_local_segment_t local;
    sci_remote_segment_t remote;
    sci_map_t map;
    sci_sequence_t sequence;
    sci_dma_queue_t queue;
    sci_dma_channel_t channel;
    sci_local_interrupt_t interrupt;
    sci_remote_interrupt_t remote_interrupt;
    sci_local_data_interrupt_t data;
    sci_remote_data_interrupt_t remote_data;
};

static void make(struct things *all)
{
    unsigned int data_number;
    TRY(SCIOpen(&all->sd, 0, &error));
    TRY(SCICreateSegment(all->sd, &all->local, 0x4a4a, 64, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(all->local, 0, 0, &error));
    TRY(SCISetSegmentAvailable(all->local, 0, 0, &error));
    TRY(SCIConnectSegment(all->sd, &all->remote, SCI_LOCAL_HOST, 0x4a4a, 0, NULL, NULL, SOON, 0,
                          &error));
    TRY(SCIMapRemoteSegment(all->remote, &all->map, 0, 64, NULL, 0, &error));
    TRY(SCICreateMapSequence(all->map, &all->sequence, 0, &error));
    TRY(SCICreateDMAQueue(all->sd, &all->queue, 0, 1, 0, &error));
    TRY(SCIRequestDMAChannel(all->sd, &all->channel, 0, SCI_DMA_TYPE_DONTCARE,
                             SCI_DMA_CHANNEL_ID_DONTCARE, SCI_FLAG_DMA_CHANNEL_SHARED, &error));
    TRY(SCICreateInterrupt(all->sd, &all->interrupt, 0, &number, NULL, NULL, 0, &error));
    TRY(SCIConnectInterrupt(all->sd, &all->remote_interrupt, SCI_LOCAL_HOST, 0, number, SOON, 0,
                            &error));
    TRY(SCICreateDataInterrupt(all->sd, &all->data, 0, &data_number, NULL, NULL, 0, &error));
    TRY(SCIConnectDataInterrupt(all->sd, &all->remote_data, SCI_LOCAL_HOST, 0, data_number, SOON,
                                0, &error));
}

static void take_down(struct things *all)
{
    TRY(SCIDisconnectDataInterrupt(all->remote_data, 0, &error));
    TRY(SCIRemoveDataInterrupt(all->data, 0, &error));
    TRY(SCIDisconnectInterrupt(all->remote_interrupt, 0, &error));
    TRY(SCIRemoveInterrupt(all->interrupt, 0, &error));
    TRY(SCIReturnDMAChannel(all->channel, &error));
    TRY(SCIRemoveDMAQueue(all->queue, 0, &error));
    TRY(SCIRemoveSequence(all->sequence, 0, &error));
    TRY(SCIUnmapSegment(all->map, 0, &error));
    TRY(SCIDisconnectSegment(all->remote, 0, &error));
    disconnected[disconnected[0] != NULL] = all->remote;
    TRY(SCIRemoveSegment(all->local, 0, &error));
    TRY(SCIClose(all->sd, 0, &error));
}

/* With each handle of all, by kind: but_for_its_kind, all others are misused; else all are. */
static void misuse_each(const struct things *all, int but_for_its_kind)
{
    void *const handles[] = {(void *)all->sd,
                             (void *)all->local,
                             (void *)all->remote,
                             (void *)all->map,
                             (void *)all->sequence,
                             (void *)all->queue,
                             (void *)all->channel,
                             (void *)all->interrupt,
                             (void *)all->remote_interrupt,
                             (void *)all->data,
                             (void *)all->remote_data};
    int kind;
    for (kind = 0; kind < (int)(sizeof handles / sizeof handles[0]); kind++)
        misuse_all(handles[kind], but_for_its_kind ? kind : -1);
}

/* Nothing is made whose handle would go nowhere: the descriptor can be closed. */
static void without_a_place(void)
{
    struct things all;
    unsigned int data_number, free_number;
    make(&all);
    free_number = number + 1;
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIOpen(NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCICreateSegment(all.sd, NULL, 0x4a4b, 64, NULL, NULL, 0, &error));
    TRY(SCIShareSegment(all.local, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCIAttachLocalSegment(all.sd, NULL, 0x4a4a, &size, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIConnectSegment(all.sd, NULL, SCI_LOCAL_HOST, 0x4a4a, 0, NULL,
                                                         NULL, SOON, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIMapLocalSegment(all.local, NULL, 0, 64, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            (void)SCIMapRemoteSegment(all.remote, NULL, 0, 64, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCICreateMapSequence(all.map, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCITransferBlockAsync(all.map, 0, all.map, 0, 8, NULL, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCICreateDMAQueue(all.sd, NULL, 0, 1, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCIRequestDMAChannel(all.sd, NULL, 0, SCI_DMA_TYPE_DONTCARE, SCI_DMA_CHANNEL_ID_DONTCARE,
                                 SCI_FLAG_DMA_CHANNEL_SHARED, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCICreateInterrupt(all.sd, NULL, 0, &free_number, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCIConnectInterrupt(all.sd, NULL, SCI_LOCAL_HOST, 0, number, SOON, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCICreateDataInterrupt(all.sd, NULL, 0, &data_number, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCIConnectDataInterrupt(all.sd, NULL, SCI_LOCAL_HOST, 0, number, SOON, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIBorrowDevice(all.sd, NULL, 1, 0, &error));
    take_down(&all);
}

int main(void)
{
    struct things first, second;
    never_handles(); /* before there is anything */
    TRY(SCIInitialize(0, &error));
    never_handles();
    make(&first);
    never_handles();
    misuse_each(&first, 1);
    take_down(&first);
    misuse_each(&first, 0);
    /* Old handles are not those of what was made since. */
    make(&second);
    misuse_each(&first, 0);
    take_down(&second);
    without_a_place();
    make(&second);
    SCITerminate();
    misuse_each(&second, 0);
    return 0;
}
