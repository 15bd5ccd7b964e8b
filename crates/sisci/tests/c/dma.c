/*
 * The copy engine: from segments and from the program's memory, both ways, in vectors of up to 256
 * pieces; waiting, being called back, aborting; what the states of a queue are. The owner's
 * segment is the far end.
 */
#include "scenario.h"

#include <stdlib.h>
#include <string.h>

enum { FAR = 0xd3a0, NEAR = 0xd3a1, OTHER = 0xd3b0, SIZE = 1 << 20 };

/* What the peer works with. */
static struct {
    sci_desc_t sd;
    sci_dma_queue_t queue;
    sci_local_segment_t local;
    sci_remote_segment_t remote;
    volatile unsigned char *near_bytes;
    volatile unsigned char *far_bytes;
    sci_map_t near_map, far_map;
} dma;

static void fill(volatile unsigned char *bytes, unsigned int seed)
{
    size_t i;
    for (i = 0; i < SIZE; i++)
        bytes[i] = (unsigned char)(seed + i * 7 + i / 256);
}

static int same(size_t near_offset, size_t far_offset, size_t size)
{
    return memcmp((const void *)(dma.near_bytes + near_offset),
                  (const void *)(dma.far_bytes + far_offset), size) == 0;
}

static sci_dma_queue_state_t wait_for(sci_dma_queue_t queue)
{
    sci_dma_queue_state_t state;
    TRY(state = SCIWaitForDMAQueue(queue, SOON, 0, &error));
    return state;
}

/* Mind the order of the parameters: local offset, size, remote offset. */
static void pushed_and_pulled(void)
{
    fill(dma.near_bytes, 1);
    fill(dma.far_bytes, 100);
    CHECK(SCIDMAQueueState(dma.queue) == SCI_DMAQUEUE_IDLE);
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 4096, 5000, 64, NULL, NULL, 0,
                            &error));
    CHECK(wait_for(dma.queue) == SCI_DMAQUEUE_DONE);
    CHECK(SCIDMAQueueState(dma.queue) == SCI_DMAQUEUE_DONE);
    CHECK(same(4096, 64, 5000) && !same(4096 + 5000, 64 + 5000, 8));
    /* And back, to another place, at odd offsets; the call waits itself. */
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 100001, 777, 3, NULL, NULL,
                            SCI_FLAG_DMA_READ | SCI_FLAG_DMA_WAIT, &error));
    CHECK(SCIDMAQueueState(dma.queue) == SCI_DMAQUEUE_DONE && same(100001, 3, 777));
    /* All of it, by each kind of engine. */
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, SIZE, 0, NULL, NULL,
                            SCI_FLAG_DMA_WAIT | SCI_FLAG_DMA_GLOBAL, &error));
    CHECK(same(0, 0, SIZE));
    fill(dma.near_bytes, 3);
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, SIZE, 0, NULL, NULL,
                            SCI_FLAG_DMA_WAIT | SCI_FLAG_DMA_SYSDMA, &error));
    CHECK(same(0, 0, SIZE));
    fill(dma.near_bytes, 4);
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, SIZE, 0, NULL, NULL,
                            SCI_FLAG_DMA_WAIT | SCI_FLAG_DMA_ADAPTER, &error));
    CHECK(same(0, 0, SIZE));
}

static void from_memory(void)
{
    unsigned char *memory = (unsigned char *)malloc(70000);
    size_t i;
    CHECK(memory != NULL);
    for (i = 0; i < 70000; i++)
        memory[i] = (unsigned char)(i * 13);
    TRY(SCIStartDmaTransferMem(dma.queue, memory + 1, dma.remote, 69999, 500, NULL, NULL,
                               SCI_FLAG_DMA_WAIT, &error));
    CHECK(memcmp((const void *)(dma.far_bytes + 500), memory + 1, 69999) == 0);
    dma.far_bytes[501] = 0xab;
    TRY(SCIStartDmaTransferMem(dma.queue, memory, dma.remote, 2, 500, NULL, NULL,
                               SCI_FLAG_DMA_READ, &error));
    CHECK(wait_for(dma.queue) == SCI_DMAQUEUE_DONE);
    CHECK(memory[0] == 13 && memory[1] == 0xab);
    free(memory);
    REFUSED(SCI_ERR_ILLEGAL_ADDRESS, SCIStartDmaTransferMem(dma.queue, NULL, dma.remote, 64, 0,
                                                            NULL, NULL, 0, &error));
}

static void vectors(void)
{
    dis_dma_vec_t pieces[DIS_DMA_MAX_VECLEN + 1];
    size_t i;
    fill(dma.near_bytes, 5);
    fill(dma.far_bytes, 200);
    memset(pieces, 0, sizeof pieces);
    for (i = 0; i < DIS_DMA_MAX_VECLEN; i++) {
        pieces[i].size = (unsigned int)(1 + i);
        pieces[i].local_offset = (unsigned int)(i * 1024);
        pieces[i].remote_offset = (unsigned int)((DIS_DMA_MAX_VECLEN - i) * 2048);
    }
    TRY(SCIStartDmaTransferVec(dma.queue, dma.local, dma.remote, DIS_DMA_MAX_VECLEN, pieces, NULL,
                               NULL, SCI_FLAG_DMA_WAIT, &error));
    for (i = 0; i < DIS_DMA_MAX_VECLEN; i++) {
        CHECK(same(i * 1024, (DIS_DMA_MAX_VECLEN - i) * 2048, 1 + i));
        CHECK(!same(i * 1024 + 1 + i, (DIS_DMA_MAX_VECLEN - i) * 2048 + 1 + i, 16));
    }
    /* Nothing is copied if one piece is bad. */
    fill(dma.far_bytes, 200);
    pieces[255].remote_offset = SIZE;
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIStartDmaTransferVec(dma.queue, dma.local, dma.remote, DIS_DMA_MAX_VECLEN, pieces,
                                   NULL, NULL, SCI_FLAG_DMA_WAIT, &error));
    CHECK(!same(0, DIS_DMA_MAX_VECLEN * 2048, 1));
    pieces[255].remote_offset = 0;
    REFUSED_SOMEHOW(SCIStartDmaTransferVec(dma.queue, dma.local, dma.remote,
                                           DIS_DMA_MAX_VECLEN + 1, pieces, NULL, NULL, 0, &error));
    REFUSED_SOMEHOW(SCIStartDmaTransferVec(dma.queue, dma.local, dma.remote, 0, pieces, NULL, NULL,
                                           0, &error));
}

static unsigned int called;
static sci_error_t status_of_call = NOT_SET;

static sci_callback_action_t on_done(void *arg, sci_dma_queue_t queue, sci_error_t status)
{
    CALLED();
    CHECK(arg == (void *)&called && queue == dma.queue);
    status_of_call = status;
    __atomic_add_fetch(&called, 1, __ATOMIC_SEQ_CST);
    return SCI_CALLBACK_CONTINUE;
}

static void called_back(void)
{
    unsigned int i;
    for (i = 0; i < 20; i++) {
        fill(dma.near_bytes, 10 + i);
        TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, SIZE, 0, on_done, &called,
                                SCI_FLAG_USE_CALLBACK, &error));
        AWAIT(__atomic_load_n(&called, __ATOMIC_SEQ_CST) == i + 1);
        CHECK(status_of_call == SCI_ERR_OK && same(0, 0, SIZE));
        CHECK(SCIDMAQueueState(dma.queue) == SCI_DMAQUEUE_DONE);
    }
    /* Without its flag, a callback is never called. */
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, 64, 0, on_done, &called, 0,
                            &error));
    CHECK(wait_for(dma.queue) == SCI_DMAQUEUE_DONE);
    CHECK(__atomic_load_n(&called, __ATOMIC_SEQ_CST) == 20);
}

static void aborted(void)
{
    sci_dma_queue_t queue;
    sci_dma_queue_state_t state;
    TRY(SCICreateDMAQueue(dma.sd, &queue, 0, 4, 0, &error));
    CHECK(SCIDMAQueueState(queue) == SCI_DMAQUEUE_IDLE);
    REFUSED(SCI_ERR_ILLEGAL_OPERATION, SCIWaitForDMAQueue(queue, 0, 0, &error));
    TRY(SCIAbortDMAQueue(queue, 0, &error)); /* nothing to abort is no mistake */
    TRY(SCIStartDmaTransfer(queue, dma.local, dma.remote, 0, SIZE, 0, NULL, NULL, 0, &error));
    TRY(SCIAbortDMAQueue(queue, 0, &error));
    state = SCIDMAQueueState(queue); /* it may have been faster */
    CHECK(state == SCI_DMAQUEUE_ABORTED || state == SCI_DMAQUEUE_DONE);
    TRY(SCIStartDmaTransfer(queue, dma.local, dma.remote, 0, 64, 0, NULL, NULL, SCI_FLAG_DMA_WAIT,
                            &error));
    CHECK(SCIDMAQueueState(queue) == SCI_DMAQUEUE_DONE);
    TRY(SCIRemoveDMAQueue(queue, 0, &error));
    REFUSED_SOMEHOW(SCIRemoveDMAQueue(queue, 0, &error));
}

static void refusals(void)
{
    sci_local_segment_t unprepared;
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, SIZE - 63, 64, 0, NULL, NULL, 0,
                                &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, 64, SIZE - 63, NULL, NULL, 0,
                                &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, (size_t)-8, 64, 0, NULL, NULL, 0,
                                &error));
    REFUSED(SCI_ERR_ILLEGAL_FLAG,
            SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, 64, 0, NULL, NULL,
                                0x80000000U, &error));
    TRY(SCICreateSegment(dma.sd, &unprepared, NEAR + 1, 64, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_SEGMENT_NOT_PREPARED,
            SCIStartDmaTransfer(dma.queue, unprepared, dma.remote, 0, 64, 0, NULL, NULL, 0,
                                &error));
    TRY(SCIRemoveSegment(unprepared, 0, &error));
}

static void channels(void)
{
    sci_dma_channel_t channel;
    TRY(SCIRequestDMAChannel(dma.sd, &channel, 0, SCI_DMA_TYPE_DONTCARE,
                             SCI_DMA_CHANNEL_ID_DONTCARE, 0, &error));
    TRY(SCIAssignDMAChannel(channel, dma.queue, 0, &error));
    fill(dma.near_bytes, 77);
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, SIZE, 0, NULL, NULL,
                            SCI_FLAG_DMA_WAIT, &error));
    CHECK(same(0, 0, SIZE));
    TRY(SCIRemoveDMAQueue(dma.queue, 0, &error));
    TRY(SCIReturnDMAChannel(channel, &error));
    REFUSED_SOMEHOW(SCIReturnDMAChannel(channel, &error));
    TRY(SCICreateDMAQueue(dma.sd, &dma.queue, 0, DIS_DMA_MAX_VECLEN, 0, &error));
}

/* The 1.x API: gather, post, wait, reset. Its order is local offset, remote offset, size. */
static void gathered(void)
{
    sci_dma_queue_t queue;
    sci_dma_queue_state_t state;
    TRY(SCICreateDMAQueue(dma.sd, &queue, 0, 2, 0, &error));
    fill(dma.near_bytes, 8);
    fill(dma.far_bytes, 90);
    REFUSED(SCI_ERR_ILLEGAL_OPERATION, SCIPostDMAQueue(queue, NULL, NULL, 0, &error));
    TRY(state = SCIEnqueueDMATransfer(queue, dma.local, dma.remote, 0, 256, 128, 0, &error));
    CHECK(state == SCI_DMAQUEUE_GATHER && SCIDMAQueueState(queue) == SCI_DMAQUEUE_GATHER);
    TRY(SCIEnqueueDMATransfer(queue, dma.local, dma.remote, 4096, 8192, 64, 0, &error));
    REFUSED(SCI_ERR_MAX_ENTRIES,
            SCIEnqueueDMATransfer(queue, dma.local, dma.remote, 0, 0, 64, 0, &error));
    CHECK(!same(0, 256, 8));
    TRY(SCIPostDMAQueue(queue, NULL, NULL, 0, &error));
    CHECK(wait_for(queue) == SCI_DMAQUEUE_DONE);
    CHECK(same(0, 256, 128) && same(4096, 8192, 64) && !same(128, 384, 8));
    TRY(SCIResetDMAQueue(queue, 0, &error));
    CHECK(SCIDMAQueueState(queue) == SCI_DMAQUEUE_IDLE);
    TRY(SCIRemoveDMAQueue(queue, 0, &error));
}

/* A segment that a transfer is about to use, or uses, is not removed. */
static void used_meanwhile(void)
{
    sci_dma_queue_t queue;
    sci_local_segment_t source;
    sci_error_t removed;
    unsigned int i;
    TRY(SCICreateDMAQueue(dma.sd, &queue, 0, 1, 0, &error));
    TRY(SCICreateSegment(dma.sd, &source, NEAR + 2, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(source, 0, 0, &error));
    TRY(SCIEnqueueDMATransfer(queue, source, dma.remote, 0, 0, 64, 0, &error));
    REFUSED(SCI_ERR_BUSY, SCIRemoveSegment(source, 0, &error));
    TRY(SCIResetDMAQueue(queue, 0, &error));
    for (i = 0; i < 50; i++) {
        TRY(SCIStartDmaTransfer(queue, source, dma.remote, 0, SIZE, 0, NULL, NULL, 0, &error));
        SCIRemoveSegment(source, 0, &removed);
        CHECK(removed == SCI_ERR_BUSY || SCIDMAQueueState(queue) == SCI_DMAQUEUE_DONE);
        CHECK(wait_for(queue) == SCI_DMAQUEUE_DONE);
        if (removed != SCI_ERR_BUSY) {
            CHECK(removed == SCI_ERR_OK);
            TRY(SCICreateSegment(dma.sd, &source, NEAR + 2, SIZE, NULL, NULL, 0, &error));
            TRY(SCIPrepareSegment(source, 0, 0, &error));
        }
    }
    TRY(SCIRemoveSegment(source, 0, &error));
    REFUSED_SOMEHOW(SCIStartDmaTransfer(queue, source, dma.remote, 0, 64, 0, NULL, NULL, 0,
                                        &error));
    TRY(SCIRemoveDMAQueue(queue, 0, &error));
}

static void peer(struct scenario *scenario)
{
    sci_remote_segment_t other;
    sci_dma_queue_t several;
    unsigned int done;
    sci_segment_cb_reason_t reason;
    sci_error_t status;
    dma.sd = scenario->sd;
    TRY(SCICreateSegment(scenario->sd, &dma.local, NEAR, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(dma.local, 0, 0, &error));
    TRY(dma.near_bytes = (volatile unsigned char *)SCIMapLocalSegment(
            dma.local, &dma.near_map, 0, SIZE, NULL, 0, &error));
    POLL(SCI_ERR_NO_SUCH_SEGMENT,
         SCIConnectSegment(scenario->sd, &dma.remote, scenario->peer, FAR, 0, NULL, NULL, 0, 0, &error));
    TRY(SCICreateDMAQueue(scenario->sd, &dma.queue, 0, DIS_DMA_MAX_VECLEN, 0, &error));
    /* The far end need not be mapped for a transfer. */
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, 64, 0, NULL, NULL,
                            SCI_FLAG_DMA_WAIT, &error));
    TRY(SCIRemoveDMAQueue(dma.queue, 0, &error));
    TRY(SCICreateDMAQueue(scenario->sd, &dma.queue, 0, DIS_DMA_MAX_VECLEN, 0, &error));
    TRY(dma.far_bytes = (volatile unsigned char *)SCIMapRemoteSegment(
            dma.remote, &dma.far_map, 0, SIZE, NULL, 0, &error));
    pushed_and_pulled();
    from_memory();
    vectors();
    called_back();
    aborted();
    refusals();
    channels();
    gathered();
    used_meanwhile();
    fill(dma.near_bytes, 42);
    /* Nobody asks for its state before the owner has left. */
    done = __atomic_load_n(&called, __ATOMIC_SEQ_CST) + 1;
    TRY(SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, SIZE, 0, on_done, &called,
                            SCI_FLAG_USE_CALLBACK, &error));
    AWAIT(__atomic_load_n(&called, __ATOMIC_SEQ_CST) == done);
    TRY(SCIConnectSegment(scenario->sd, &other, scenario->peer, OTHER, 0, NULL, NULL, SOON, 0, &error));
    TRY(SCICreateDMAQueue(dma.sd, &several, 0, 2, 0, &error));
    TRY(SCIEnqueueDMATransfer(several, dma.local, other, 0, 0, 64, 0, &error));
    TRY(SCIEnqueueDMATransfer(several, dma.local, dma.remote, 0, 0, 64, 0, &error));
    scenario_meet(scenario); /* the owner looks, and removes its segment */
    scenario_meet(scenario);
    TRY(reason = SCIWaitForRemoteSegmentEvent(dma.remote, &status, SOON, 0, &error));
    CHECK(reason == SCI_CB_DISCONNECT);
    /* What was done before stays done, and what reaches only one of two has failed. */
    CHECK(SCIDMAQueueState(dma.queue) == SCI_DMAQUEUE_DONE);
    CHECK(wait_for(dma.queue) == SCI_DMAQUEUE_DONE);
    TRY(SCIPostDMAQueue(several, NULL, NULL, 0, &error));
    CHECK(wait_for(several) == SCI_DMAQUEUE_ERROR);
    TRY(SCIRemoveDMAQueue(several, 0, &error));
    TRY(SCIDisconnectSegment(other, 0, &error));
    do { /* the news of it come by another way */
        SCIStartDmaTransfer(dma.queue, dma.local, dma.remote, 0, 64, 0, NULL, NULL,
                            SCI_FLAG_DMA_WAIT, &error);
    } while (error == SCI_ERR_OK);
    CHECK(error == SCI_ERR_SEGMENT_NOT_CONNECTED || error == SCI_ERR_TRANSFER_FAILED);
    TRY(SCIRemoveDMAQueue(dma.queue, 0, &error));
    TRY(SCIUnmapSegment(dma.far_map, 0, &error));
    TRY(SCIDisconnectSegment(dma.remote, 0, &error));
    TRY(SCIUnmapSegment(dma.near_map, 0, &error));
    TRY(SCIRemoveSegment(dma.local, 0, &error));
}

static void owner(struct scenario *scenario)
{
    sci_local_segment_t segment, other;
    sci_map_t map;
    volatile unsigned char *bytes;
    size_t i;
    TRY(SCICreateSegment(scenario->sd, &other, OTHER, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(other, 0, 0, &error));
    TRY(SCISetSegmentAvailable(other, 0, 0, &error));
    TRY(SCICreateSegment(scenario->sd, &segment, FAR, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(bytes = (volatile unsigned char *)SCIMapLocalSegment(segment, &map, 0, SIZE, NULL, 0,
                                                             &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    scenario_meet(scenario);
    for (i = 0; i < SIZE; i++)
        CHECK(bytes[i] == (unsigned char)(42 + i * 7 + i / 256));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIRemoveSegment(segment, 0, &error));
    scenario_meet(scenario);
    TRY(SCIRemoveSegment(other, 0, &error));
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
