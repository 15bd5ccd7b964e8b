/*
 * The copy engine (DMA). Included by sisci_api.h, which tells the conventions.
 *
 * A queue carries one transfer at a time: start it, then wait for it, be called back, or ask for
 * its state. The remote segment need not be mapped.
 */
#ifndef SISCI_API_DMA_H
#define SISCI_API_DMA_H

#include "sisci_api_macros.h"
#include "sisci_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Makes a queue, which is idle. maxEntries: the most transfers that the 1.x calls may gather in it.
 * flags: DMA_GLOBAL, DMA_SYSDMA, DMA_ADAPTER. SCI_ERR_NOT_SUPPORTED: DMA_PHDMA.
 */
SISCI_API_EXPORT void SCICreateDMAQueue(sci_desc_t sd, sci_dma_queue_t *dq,
                                        unsigned int localAdapterNo, unsigned int maxEntries,
                                        unsigned int flags, sci_error_t *error);

/* SCI_ERR_ILLEGAL_OPERATION: a transfer is under way. */
SISCI_API_EXPORT void SCIRemoveDMAQueue(sci_dma_queue_t dq, unsigned int flags,
                                        sci_error_t *error);

/* Ends what is under way; succeeds also when nothing is. */
SISCI_API_EXPORT void SCIAbortDMAQueue(sci_dma_queue_t dq, unsigned int flags,
                                       sci_error_t *error);

SISCI_API_EXPORT sci_dma_queue_state_t SCIDMAQueueState(sci_dma_queue_t dq);

/*
 * Waits for the transfer and answers how the queue is then. SCI_ERR_TIMEOUT.
 * SCI_ERR_ILLEGAL_OPERATION: nothing was started.
 */
SISCI_API_EXPORT sci_dma_queue_state_t SCIWaitForDMAQueue(sci_dma_queue_t dq, unsigned int timeout,
                                                          unsigned int flags, sci_error_t *error);

/*
 * Copies size bytes from the local to the remote segment. Mind the order: local offset, size,
 * remote offset. flags: USE_CALLBACK; DMA_READ, from the remote to the local one; DMA_WAIT, return
 * when done; DMA_GLOBAL, DMA_SYSDMA, DMA_ADAPTER, which are the same engine here; BROADCAST.
 * SCI_ERR_OUT_OF_RANGE. SCI_ERR_ILLEGAL_OPERATION: the one before has not ended.
 * SCI_ERR_SEGMENT_NOT_PREPARED, SCI_ERR_SEGMENT_NOT_CONNECTED. SCI_ERR_SIZE_ALIGNMENT: size is 0.
 */
SISCI_API_EXPORT void SCIStartDmaTransfer(sci_dma_queue_t dq, sci_local_segment_t localSegment,
                                          sci_remote_segment_t remoteSegment, size_t localOffset,
                                          size_t size, size_t remoteOffset, sci_cb_dma_t callback,
                                          void *callbackArg, unsigned int flags,
                                          sci_error_t *error);

/*
 * The same with the program's own memory, which has to stay until the transfer has ended.
 * SCI_ERR_ILLEGAL_ADDRESS: it is NULL.
 */
SISCI_API_EXPORT void SCIStartDmaTransferMem(sci_dma_queue_t dq, void *localAddress,
                                             sci_remote_segment_t remoteSegment, size_t size,
                                             size_t remoteOffset, sci_cb_dma_t callback,
                                             void *callbackArg, unsigned int flags,
                                             sci_error_t *error);

/*
 * The same for up to DIS_DMA_MAX_VECLEN pieces, in order; nothing is copied if one of them is bad.
 * SCI_ERR_MAX_ENTRIES: more than that. SCI_ERR_ILLEGAL_PARAMETER: none.
 */
SISCI_API_EXPORT void SCIStartDmaTransferVec(sci_dma_queue_t dq, sci_local_segment_t localSegment,
                                             sci_remote_segment_t remoteSegment, size_t vecLength,
                                             dis_dma_vec_t *disDmaVec, sci_cb_dma_t callback,
                                             void *callbackArg, unsigned int flags,
                                             sci_error_t *error);

/* Other names of the first and the last of these. Ours. */
SISCI_API_EXPORT void DISStartDmaTransfer(sci_dma_queue_t dq, sci_local_segment_t localSegment,
                                          sci_remote_segment_t remoteSegment, size_t localOffset,
                                          size_t size, size_t remoteOffset, sci_cb_dma_t callback,
                                          void *callbackArg, unsigned int flags,
                                          sci_error_t *error);
SISCI_API_EXPORT void DISStartDmaTransferVec(sci_dma_queue_t dq, sci_local_segment_t localSegment,
                                             sci_remote_segment_t remoteSegment, size_t vecLength,
                                             dis_dma_vec_t *disDmaVec, sci_cb_dma_t callback,
                                             void *callbackArg, unsigned int flags,
                                             sci_error_t *error);

/*
 * Asks for an engine. dmaChannel: SCI_DMA_CHANNEL_ID_DONTCARE, or a number.
 * flags: DMA_CHANNEL_SHARED. SCI_ERR_DMA_NOT_AVAILABLE: no engine of this type or number.
 */
SISCI_API_EXPORT void SCIRequestDMAChannel(sci_desc_t sd, sci_dma_channel_t *channel,
                                           unsigned int localAdapterNo, sci_dma_type_t dmaType,
                                           unsigned int dmaChannel, unsigned int flags,
                                           sci_error_t *error);

/* Lets a queue use this engine. */
SISCI_API_EXPORT void SCIAssignDMAChannel(sci_dma_channel_t channel, sci_dma_queue_t dq,
                                          unsigned int flags, sci_error_t *error);

/* Gives it back; takes no flags. SCI_ERR_BUSY: a queue has it. */
SISCI_API_EXPORT void SCIReturnDMAChannel(sci_dma_channel_t channel, sci_error_t *error);

/* Announce that a segment will be used with an engine; nothing is to be done here. */
SISCI_API_EXPORT void SCIPrepareLocalSegmentForDMA(sci_dma_channel_t channel,
                                                   sci_local_segment_t segment,
                                                   unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIUnprepareLocalSegmentForDMA(sci_dma_channel_t channel,
                                                     sci_local_segment_t segment,
                                                     unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIPrepareRemoteSegmentForDMA(sci_dma_channel_t channel,
                                                    sci_remote_segment_t segment,
                                                    unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIUnprepareRemoteSegmentForDMA(sci_dma_channel_t channel,
                                                      sci_remote_segment_t segment,
                                                      unsigned int flags, sci_error_t *error);

/* What follows is of the 1.x API: gather transfers in a queue, then post them together. */

/*
 * Adds a transfer. Mind the order: local offset, remote offset, size. flags: DMA_READ; DMA_POST,
 * post at once. SCI_ERR_MAX_ENTRIES: the queue is full. SCI_ERR_ILLEGAL_OPERATION: it was posted.
 */
SISCI_API_EXPORT sci_dma_queue_state_t SCIEnqueueDMATransfer(
    sci_dma_queue_t dq, sci_local_segment_t localSegment, sci_remote_segment_t remoteSegment,
    unsigned int localOffset, unsigned int remoteOffset, unsigned int size, unsigned int flags,
    sci_error_t *error);

/* Starts what was gathered. flags: USE_CALLBACK. SCI_ERR_ILLEGAL_OPERATION: nothing was. */
SISCI_API_EXPORT void SCIPostDMAQueue(sci_dma_queue_t dq, sci_cb_dma_t callback,
                                      void *callbackArg, unsigned int flags, sci_error_t *error);

/* Makes it idle again. SCI_ERR_ILLEGAL_OPERATION: a transfer is under way. */
SISCI_API_EXPORT void SCIResetDMAQueue(sci_dma_queue_t dq, unsigned int flags,
                                       sci_error_t *error);

/* Transfers from raw bus addresses: SCI_ERR_NOT_SUPPORTED, as no program gets such access here. */
SISCI_API_EXPORT void SCIphDmaEnqueue(sci_dma_queue_t dq, unsigned int size,
                                      sci_ioaddr_t localBusAddr, unsigned int remote_nodeid,
                                      unsigned int remote_highaddr, unsigned int remote_lowaddr,
                                      unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT sci_dma_queue_state_t SCIphDmaStart(sci_dma_queue_t dq, sci_cb_dma_t callback,
                                                     void *callbackArg, unsigned int flags,
                                                     sci_error_t *error);

#ifdef __cplusplus
}
#endif

#endif
