/*
 * Segments: memory that one host creates and others map. Included by sisci_api.h, which tells the
 * conventions.
 *
 * Life of a segment: create, prepare, set available; others connect and map it; they unmap and
 * disconnect; remove. Its id is any 32-bit number that is free on its host.
 */
#ifndef SISCI_API_SEGMENTS_H
#define SISCI_API_SEGMENTS_H

#include "sisci_api_macros.h"
#include "sisci_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Creates a segment of zeroes. Any size from 1 byte. flags:
 *   USE_CALLBACK
 *   EMPTY         no memory of its own until some is registered
 *   PRIVATE       never available to others
 *   AUTO_ID       the first free id from segmentId on (see SCIGetLocalSegmentId)
 *   BROADCAST     a reflective segment, segmentId is its group: what is stored to the group arrives
 *                 in the segment of each host that has one; who joins a group that others are in
 *                 may find what they stored
 *   DMA_GLOBAL    means nothing here
 * SCI_ERR_SEGMENTID_USED. SCI_ERR_SIZE_ALIGNMENT: size is 0. SCI_ERR_FLAG_NOT_IMPLEMENTED:
 * ALLOW_UNICAST.
 */
SISCI_API_EXPORT void SCICreateSegment(sci_desc_t sd, sci_local_segment_t *segment,
                                       unsigned int segmentId, size_t size,
                                       sci_cb_local_segment_t callback, void *callbackArg,
                                       unsigned int flags, sci_error_t *error);

/* Readies it for an adapter. flags: DMA_SOURCE_ONLY, BROADCAST. */
SISCI_API_EXPORT void SCIPrepareSegment(sci_local_segment_t segment, unsigned int localAdapterNo,
                                        unsigned int flags, sci_error_t *error);

/*
 * Maps size bytes from offset into this process; prepared or not. addr is a hint, or with
 * FIXED_MAP_ADDR the page-aligned place. NULL on errors. flags: FIXED_MAP_ADDR, READONLY_MAP.
 * SCI_ERR_OUT_OF_RANGE: not inside of the segment. SCI_ERR_SIZE_ALIGNMENT: size is 0.
 * SCI_ERR_OFFSET_ALIGNMENT, SCI_ERR_ILLEGAL_ADDRESS: the fixed place cannot be had.
 * SCI_ERR_NOT_CONNECTED: it is attached to, and its owner is gone.
 */
SISCI_API_EXPORT void *SCIMapLocalSegment(sci_local_segment_t segment, sci_map_t *map,
                                          size_t offset, size_t size, void *addr,
                                          unsigned int flags, sci_error_t *error);

/*
 * Lets others connect. SCI_ERR_SEGMENT_NOT_PREPARED. SCI_ERR_ILLEGAL_OPERATION: it is private.
 */
SISCI_API_EXPORT void SCISetSegmentAvailable(sci_local_segment_t segment,
                                             unsigned int localAdapterNo, unsigned int flags,
                                             sci_error_t *error);

/*
 * Lets nobody connect any more; who is connected stays. flags: NOTIFY, tell them (their callback
 * gets SCI_CB_DISCONNECT); FORCE_DISCONNECT, end their connections, available or not.
 * SCI_ERR_ILLEGAL_OPERATION: it is not available.
 */
SISCI_API_EXPORT void SCISetSegmentUnavailable(sci_local_segment_t segment,
                                               unsigned int localAdapterNo, unsigned int flags,
                                               sci_error_t *error);

/*
 * Removes it and frees its id, available or connected or not. Who has it mapped still reads what
 * was there last, until it unmaps. flags: FORCE_REMOVE. SCI_ERR_BUSY: this process still has it
 * mapped, or uses it in a transfer.
 */
SISCI_API_EXPORT void SCIRemoveSegment(sci_local_segment_t segment, unsigned int flags,
                                       sci_error_t *error);

/* The size that it was created with; its id. 0 for a handle that is not valid. */
SISCI_API_EXPORT size_t SCIGetLocalSegmentSize(sci_local_segment_t segment);
SISCI_API_EXPORT unsigned int SCIGetLocalSegmentId(sci_local_segment_t segment);

/*
 * Waits for the next event of a segment that has no callback. The answer is meaningful with
 * SCI_ERR_OK only. SCI_ERR_TIMEOUT. SCI_ERR_CANCELLED: it was removed.
 */
SISCI_API_EXPORT sci_segment_cb_reason_t SCIWaitForLocalSegmentEvent(
    sci_local_segment_t segment, unsigned int *sourceNodeId, unsigned int *localAdapterNo,
    unsigned int timeout, unsigned int flags, sci_error_t *error);

/* Lets other processes of this host attach to it. */
SISCI_API_EXPORT void SCIShareSegment(sci_local_segment_t segment, unsigned int flags,
                                      sci_error_t *error);

/*
 * Attaches to a segment that another process of this host shares; size receives its size. Remove it
 * like an own one. flags: USE_CALLBACK, BROADCAST.
 * SCI_ERR_NO_SUCH_SEGMENT: not there, or not shared. SCI_ERR_ACCESS: the rack does not allow it.
 */
SISCI_API_EXPORT void SCIAttachLocalSegment(sci_desc_t sd, sci_local_segment_t *segment,
                                            unsigned int segmentId, size_t *size,
                                            sci_cb_local_segment_t callback, void *callbackArg,
                                            unsigned int flags, sci_error_t *error);

/*
 * Gives an EMPTY segment the program's own memory. flags: LOCK_USER_MEM.
 * SCI_ERR_ILLEGAL_OPERATION: not empty. SCI_ERR_SIZE_ALIGNMENT. SCI_ERR_ILLEGAL_ADDRESS.
 * SCI_ERR_OUT_OF_RANGE: more than the segment's size.
 */
SISCI_API_EXPORT void SCIRegisterSegmentMemory(void *address, size_t size,
                                               sci_local_segment_t segment, unsigned int flags,
                                               sci_error_t *error);

/*
 * Gives an EMPTY segment physical memory, or a GPU's (CUDA_BUFFER): SCI_ERR_NOT_SUPPORTED, as no
 * program gets such access here.
 */
SISCI_API_EXPORT void SCIAttachPhysicalMemory(sci_ioaddr_t ioaddress, void *address,
                                              unsigned int busNo, size_t size,
                                              sci_local_segment_t segment, unsigned int flags,
                                              sci_error_t *error);

/*
 * Connects to a segment of a host, this one included; a timeout of 0 tries once. With
 * DIS_BROADCAST_NODEID_GROUP_ALL and BROADCAST: to a group. flags: USE_CALLBACK; BROADCAST;
 * ASYNCHRONOUS_CONNECT, return at once and tell the callback: SCI_CB_CONNECT with how it ended,
 * before anything else.
 * SCI_ERR_NO_SUCH_SEGMENT: not there, or not available yet; try again. SCI_ERR_CONNECTION_REFUSED.
 * SCI_ERR_TIMEOUT. SCI_ERR_NO_LINK_ACCESS, SCI_ERR_NO_REMOTE_LINK_ACCESS: no way to that host.
 */
SISCI_API_EXPORT void SCIConnectSegment(sci_desc_t sd, sci_remote_segment_t *segment,
                                        unsigned int nodeId, unsigned int segmentId,
                                        unsigned int localAdapterNo,
                                        sci_cb_remote_segment_t callback, void *callbackArg,
                                        unsigned int timeout, unsigned int flags,
                                        sci_error_t *error);

/* Ends the connection, also after its owner removed the segment. SCI_ERR_BUSY: still mapped. */
SISCI_API_EXPORT void SCIDisconnectSegment(sci_remote_segment_t segment, unsigned int flags,
                                           sci_error_t *error);

/* Its size as created; its id; its host. 0 for a handle that is not valid. */
SISCI_API_EXPORT size_t SCIGetRemoteSegmentSize(sci_remote_segment_t segment);
SISCI_API_EXPORT unsigned int SCIGetRemoteSegmentId(sci_remote_segment_t segment);
SISCI_API_EXPORT unsigned int SCIGetRemoteSegmentNodeId(sci_remote_segment_t segment);

/*
 * Waits for the next event of a connection that has no callback; status tells how the segment is.
 * SCI_ERR_TIMEOUT. SCI_ERR_CANCELLED: it was disconnected. SCI_ERR_ILLEGAL_OPERATION.
 */
SISCI_API_EXPORT sci_segment_cb_reason_t SCIWaitForRemoteSegmentEvent(
    sci_remote_segment_t segment, sci_error_t *status, unsigned int timeout, unsigned int flags,
    sci_error_t *error);

/*
 * Maps size bytes from offset of the other host's segment, any number of times. addr as with
 * SCIMapLocalSegment. NULL on errors. flags: FIXED_MAP_ADDR, READONLY_MAP, BROADCAST; what speaks
 * of hardware buffers is accepted and means nothing here. SCI_ERR_OUT_OF_RANGE,
 * SCI_ERR_SIZE_ALIGNMENT, SCI_ERR_OFFSET_ALIGNMENT, SCI_ERR_NOT_CONNECTED.
 */
SISCI_API_EXPORT volatile void *SCIMapRemoteSegment(sci_remote_segment_t segment, sci_map_t *map,
                                                    size_t offset, size_t size, void *addr,
                                                    unsigned int flags, sci_error_t *error);

/* Unmaps, and ends the sequences on the map. */
SISCI_API_EXPORT void SCIUnmapSegment(sci_map_t map, unsigned int flags, sci_error_t *error);

/* Where it is mapped; its address on the bus. NULL and 0 for a handle that is not valid. */
SISCI_API_EXPORT volatile void *SCIGetMapPointer(sci_map_t map);
SISCI_API_EXPORT sci_ioaddr_t SCIGetMapPhysAddr(sci_map_t map);

/* Connects to a raw address of the 1.x hardware: SCI_ERR_NOT_SUPPORTED, as there is none. */
SISCI_API_EXPORT void SCIConnectSCISpace(sci_desc_t sd, unsigned int localAdapterNo,
                                         sci_remote_segment_t *segment, sci_address_t address,
                                         size_t size, unsigned int flags, sci_error_t *error);

#ifdef __cplusplus
}
#endif

#endif
