/*
 * The SISCI API on rackbus: shared memory between the hosts of a rack.
 *
 * A program calls SCIInitialize, opens a descriptor, and creates segments, interrupts and queues
 * with it. Another host's program connects to them by node id and number, and maps segments: from
 * then on a store through the pointer is a store into the other host's memory.
 *
 * Conventions. The last parameter receives SCI_ERR_OK or what went wrong; it must not be NULL.
 * Every function may answer SCI_ERR_NOT_INITIALIZED (before SCIInitialize),
 * SCI_ERR_ILLEGAL_PARAMETER (a handle that is not valid, a NULL that must not be),
 * SCI_ERR_ILLEGAL_FLAG, SCI_ERR_NOT_IMPLEMENTED and SCI_ERR_SYSTEM; what takes an adapter,
 * SCI_ERR_ILLEGAL_ADAPTERNO and SCI_ERR_NO_SUCH_ADAPTERNO; what takes a node,
 * SCI_ERR_ILLEGAL_NODEID and SCI_ERR_NO_SUCH_NODEID; what makes something, SCI_ERR_NOSPC. The
 * comments below tell the other errors. The adapter is number 0. Timeouts are in milliseconds,
 * sizes and offsets in bytes. Where a comment says "ours", the API's prototype is not public and
 * this one is rackbus's own.
 */
#ifndef SISCI_API_H
#define SISCI_API_H

#include <stddef.h>

#include "dis_types.h"
#include "sisci_api_macros.h"
#include "sisci_error.h"
#include "sisci_types.h"

#include "sisci_api_copy.h"
#include "sisci_api_devices.h"
#include "sisci_api_dma.h"
#include "sisci_api_interrupts.h"
#include "sisci_api_segments.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Readies the library; once in a process, before all else. flags: 0.
 * SCI_ERR_INCONSISTENT_VERSIONS: the host's node is of another version.
 */
SISCI_API_EXPORT void SCIInitialize(unsigned int flags, sci_error_t *error);

/* Removes all that the process still has, and ends the library. */
SISCI_API_EXPORT void SCITerminate(void);

/* Opens a descriptor. flags: SCI_FLAG_THREAD_SAFE, which always holds here. */
SISCI_API_EXPORT void SCIOpen(sci_desc_t *sd, unsigned int flags, sci_error_t *error);

/* Closes a descriptor. SCI_ERR_BUSY: something made with it is left; it then stays open. */
SISCI_API_EXPORT void SCIClose(sci_desc_t sd, unsigned int flags, sci_error_t *error);

/*
 * Answers a question: command is one of SCI_Q_*, data the structure that goes with it. For
 * SCI_Q_DMA, flags is SCI_FLAG_DMA_ADAPTER, _GLOBAL or _SYSDMA. Needs no descriptor.
 * SCI_ERR_ILLEGAL_QUERY: no such command or subcommand.
 */
SISCI_API_EXPORT void SCIQuery(unsigned int command, void *data, unsigned int flags,
                               sci_error_t *error);

/* The node id of this host. */
SISCI_API_EXPORT void SCIGetLocalNodeId(unsigned int adapterNo, unsigned int *nodeId,
                                        unsigned int flags, sci_error_t *error);

/*
 * The node ids of the host (or adapter) of a name, ended by a zero. The list is all zero if nobody
 * has this name.
 */
SISCI_API_EXPORT void SCIGetNodeIdByAdapterName(const char *adapterName,
                                                dis_nodeId_list_t *nodeIdList,
                                                dis_virt_adapter_t *type, unsigned int flags,
                                                sci_error_t *error);

/* The same, with the number of the local adapter that leads there. Ours. */
SISCI_API_EXPORT void SCIGetNodeInfoByAdapterName(const char *adapterName,
                                                  unsigned int *localAdapterNo,
                                                  dis_nodeId_list_t *nodeIdList,
                                                  dis_virt_adapter_t *type, unsigned int flags,
                                                  sci_error_t *error);

/* What an error means, in one line. Never NULL, whatever the number. */
SISCI_API_EXPORT const char *SCIGetErrorString(sci_error_t error);

/* The name of a type, or of a family, of adapters (SCI_Q_ADAPTER_CARD_TYPE). Never NULL. */
SISCI_API_EXPORT const char *SCIGetAdapterTypeString(unsigned int type);
SISCI_API_EXPORT const char *SCIGetAdapterFamilyString(unsigned int type);

/*
 * Not 0 if the node answers. SCI_ERR_NO_LINK_ACCESS: this host is cut off.
 * SCI_ERR_NO_REMOTE_LINK_ACCESS: the other one is, or it is not up.
 */
SISCI_API_EXPORT int SCIProbeNode(sci_desc_t sd, unsigned int localAdapterNo, unsigned int nodeId,
                                  unsigned int flags, sci_error_t *error);

/* Registers of the 1.x hardware: SCI_ERR_NOT_SUPPORTED, as there is none. */
SISCI_API_EXPORT unsigned int SCIGetCSRRegister(sci_desc_t sd, unsigned int localAdapterNo,
                                                unsigned int SCINodeId, unsigned int CSROffset,
                                                unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCISetCSRRegister(sci_desc_t sd, unsigned int localAdapterNo,
                                        unsigned int SCINodeId, unsigned int CSROffset,
                                        unsigned int CSRValue, unsigned int flags,
                                        sci_error_t *error);
SISCI_API_EXPORT unsigned int SCIGetLocalCSR(sci_desc_t sd, unsigned int localAdapterNo,
                                             unsigned int CSROffset, unsigned int flags,
                                             sci_error_t *error);
SISCI_API_EXPORT void SCISetLocalCSR(sci_desc_t sd, unsigned int localAdapterNo,
                                     unsigned int CSROffset, unsigned int CSRValue,
                                     unsigned int flags, sci_error_t *error);

#ifdef __cplusplus
}
#endif

#endif
