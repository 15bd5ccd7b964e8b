/*
 * Sequences, barriers, and copies by the CPU. Included by sisci_api.h, which tells the
 * conventions.
 *
 * Stores through a map arrive in their order. A sequence tells whether those since the last check
 * have arrived; it fails when the way to the other host, or the segment, is gone.
 */
#ifndef SISCI_API_COPY_H
#define SISCI_API_COPY_H

#include "sisci_api_macros.h"
#include "sisci_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* flags: FAST_BARRIER. */
SISCI_API_EXPORT void SCICreateMapSequence(sci_map_t map, sci_sequence_t *sequence,
                                           unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIRemoveSequence(sci_sequence_t sequence, unsigned int flags,
                                        sci_error_t *error);

/* Begins a stretch of stores; repeat until it is SCI_SEQ_OK. */
SISCI_API_EXPORT sci_sequence_status_t SCIStartSequence(sci_sequence_t sequence,
                                                        unsigned int flags, sci_error_t *error);

/*
 * Ends it and tells how it went; also without a start. flags: NO_FLUSH, NO_STORE_BARRIER. Once the
 * segment is gone, SCI_SEQ_NOT_RETRIABLE; on one machine the first check after its owner removed it
 * is of stores that had arrived before.
 */
SISCI_API_EXPORT sci_sequence_status_t SCICheckSequence(sci_sequence_t sequence,
                                                        unsigned int flags, sci_error_t *error);

/* Waits until all stores before it have left the CPU. */
SISCI_API_EXPORT void SCIStoreBarrier(sci_sequence_t sequence, unsigned int flags);

/* The same for write-combining buffers. The sequence may be NULL. flags: FLUSH_CPU_BUFFERS_ONLY. */
SISCI_API_EXPORT void SCIFlush(sci_sequence_t sequence, unsigned int flags);

/*
 * Copies size bytes from memAddr to an offset of a map; with BLOCK_READ, from the map to memAddr.
 * The sequence may be NULL. flags: BLOCK_READ; ERROR_CHECK, which checks the map like a sequence,
 * and the sequence's, where that is another one.
 * SCI_ERR_OUT_OF_RANGE: not inside of the map. SCI_ERR_TRANSFER_FAILED.
 */
SISCI_API_EXPORT void SCIMemCpy(sci_sequence_t sequence, void *memAddr, sci_map_t remoteMap,
                                size_t remoteOffset, size_t size, unsigned int flags,
                                sci_error_t *error);

/* Copies the same bytes to the same offset of two maps; ERROR_CHECK is of both. Ours. */
SISCI_API_EXPORT void SCIMemCpy_dual(sci_sequence_t sequence, void *memAddr, sci_map_t firstMap,
                                     sci_map_t secondMap, size_t remoteOffset, size_t size,
                                     unsigned int flags, sci_error_t *error);

/*
 * Copies to a pointer into a map, which must have room: as with memcpy, nobody checks.
 * SCI_ERR_ILLEGAL_ADDRESS: a pointer is NULL.
 */
SISCI_API_EXPORT void SCIMemWrite(void *memAddr, volatile void *remoteAddr, size_t size,
                                  unsigned int flags, sci_error_t *error);

/* Caches are coherent here: succeeds. map may be NULL. flags: CACHE_FLUSH, CACHE_INVALIDATE. */
SISCI_API_EXPORT void SCICacheSync(sci_map_t map, void *addr, size_t length, unsigned int flags,
                                   sci_error_t *error);

/* Which copy routine SCIMemCpy uses; there is one here, so that any index is as good. */
SISCI_API_EXPORT int GetSciMemCopyFunction(void);
SISCI_API_EXPORT void SetSciMemCopyFunction(int index);

/* What follows is of the 1.x API. */

SISCI_API_EXPORT void SCIFlushReadBuffers(sci_sequence_t sequence);

/* SCIMemCpy without a sequence. */
SISCI_API_EXPORT void SCIMemCopy(void *memAddr, sci_map_t remoteMap, unsigned int remoteOffset,
                                 unsigned int size, unsigned int flags, sci_error_t *error);

/*
 * Copies between two maps and returns when it is done. SCI_ERR_OUT_OF_RANGE. SCI_ERR_ACCESS: the
 * destination is mapped to be read. SCI_ERR_TRANSFER_FAILED: a segment is gone.
 */
SISCI_API_EXPORT void SCITransferBlock(sci_map_t sourceMap, unsigned int sourceOffset,
                                       sci_map_t destinationMap, unsigned int destinationOffset,
                                       unsigned int size, unsigned int flags, sci_error_t *error);

/*
 * The same, in the background: refused at once where it cannot be, else its callback, or who waits,
 * learns how it ended. The callback needs USE_CALLBACK; block may be NULL only with it.
 */
SISCI_API_EXPORT void SCITransferBlockAsync(sci_map_t sourceMap, unsigned int sourceOffset,
                                            sci_map_t destinationMap,
                                            unsigned int destinationOffset, unsigned int size,
                                            sci_block_transfer_t *block,
                                            sci_cb_block_transfer_t callback, void *callbackArg,
                                            unsigned int flags, sci_error_t *error);

/*
 * Waits for it, and forgets it. SCI_ERR_TIMEOUT. SCI_ERR_TRANSFER_FAILED: it failed. A transfer that
 * has begun is not cut short: to abort it is to wait for it.
 */
SISCI_API_EXPORT void SCIWaitForBlockTransfer(sci_block_transfer_t block, unsigned int timeout,
                                              unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIAbortBlockTransfer(sci_block_transfer_t block, unsigned int flags,
                                            sci_error_t *error);

#ifdef __cplusplus
}
#endif

#endif
