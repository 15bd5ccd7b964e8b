/*
 * Interrupts between programs, with and without a message. Included by sisci_api.h, which tells
 * the conventions.
 *
 * Numbers belong to a host; those of data interrupts are counted apart. A trigger that comes
 * before its wait is remembered.
 */
#ifndef SISCI_API_INTERRUPTS_H
#define SISCI_API_INTERRUPTS_H

#include "sisci_api_macros.h"
#include "sisci_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Makes an interrupt; interruptNo receives its number, or with FIXED_INTNO says it. flags:
 * USE_CALLBACK; FIXED_INTNO; COUNTING_INT, each trigger counts (else those that meet are one);
 * SHARED_INT, several may have the same number, and all are triggered.
 * SCI_ERR_INTNO_USED.
 */
SISCI_API_EXPORT void SCICreateInterrupt(sci_desc_t sd, sci_local_interrupt_t *interrupt,
                                         unsigned int localAdapterNo, unsigned int *interruptNo,
                                         sci_cb_interrupt_t callback, void *callbackArg,
                                         unsigned int flags, sci_error_t *error);

/* The same, with a name for the host's lists. Ours. */
SISCI_API_EXPORT void SCICreateNamedInterrupt(sci_desc_t sd, sci_local_interrupt_t *interrupt,
                                              unsigned int localAdapterNo,
                                              unsigned int *interruptNo, const char *name,
                                              sci_cb_interrupt_t callback, void *callbackArg,
                                              unsigned int flags, sci_error_t *error);

/* Removes it; who waits for it gets SCI_ERR_CANCELLED. */
SISCI_API_EXPORT void SCIRemoveInterrupt(sci_local_interrupt_t interrupt, unsigned int flags,
                                         sci_error_t *error);

/* SCI_ERR_TIMEOUT. SCI_ERR_CANCELLED: it was removed, or the host's node is gone. */
SISCI_API_EXPORT void SCIWaitForInterrupt(sci_local_interrupt_t interrupt, unsigned int timeout,
                                          unsigned int flags, sci_error_t *error);

/*
 * Connects to an interrupt of a host, this one included. SCI_ERR_NO_SUCH_INTNO: not there yet; try
 * again. SCI_ERR_CONNECTION_REFUSED. SCI_ERR_TIMEOUT.
 */
SISCI_API_EXPORT void SCIConnectInterrupt(sci_desc_t sd, sci_remote_interrupt_t *interrupt,
                                          unsigned int nodeId, unsigned int localAdapterNo,
                                          unsigned int interruptNo, unsigned int timeout,
                                          unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIDisconnectInterrupt(sci_remote_interrupt_t interrupt, unsigned int flags,
                                             sci_error_t *error);

/* Stores that were made before it have arrived when it is seen. */
SISCI_API_EXPORT void SCITriggerInterrupt(sci_remote_interrupt_t interrupt, unsigned int flags,
                                          sci_error_t *error);

/* Makes a data interrupt. flags: USE_CALLBACK, FIXED_INTNO, BROADCAST. SCI_ERR_INTNO_USED. */
SISCI_API_EXPORT void SCICreateDataInterrupt(sci_desc_t sd,
                                             sci_local_data_interrupt_t *interrupt,
                                             unsigned int localAdapterNo,
                                             unsigned int *interruptNo,
                                             sci_cb_data_interrupt_t callback, void *callbackArg,
                                             unsigned int flags, sci_error_t *error);

/* Removes it; its own callback may do so. */
SISCI_API_EXPORT void SCIRemoveDataInterrupt(sci_local_data_interrupt_t interrupt,
                                             unsigned int flags, sci_error_t *error);

/*
 * Takes the oldest message. length: how much data has room for, then how long the message was.
 * SCI_ERR_TIMEOUT. SCI_ERR_CANCELLED: it was removed, or the host's node is gone, and no message
 * is left. SCI_ERR_NOSPC: no room for it; it stays the oldest.
 */
SISCI_API_EXPORT void SCIWaitForDataInterrupt(sci_local_data_interrupt_t interrupt, void *data,
                                              unsigned int *length, unsigned int timeout,
                                              unsigned int flags, sci_error_t *error);

/*
 * As SCIConnectInterrupt. With BROADCAST and DIS_BROADCAST_NODEID_GROUP_ALL: to that number on
 * every host.
 */
SISCI_API_EXPORT void SCIConnectDataInterrupt(sci_desc_t sd,
                                              sci_remote_data_interrupt_t *interrupt,
                                              unsigned int nodeId, unsigned int localAdapterNo,
                                              unsigned int interruptNo, unsigned int timeout,
                                              unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIDisconnectDataInterrupt(sci_remote_data_interrupt_t interrupt,
                                                 unsigned int flags, sci_error_t *error);

/*
 * Sends a message of 1 to SCI_MAX_DATA_INTERRUPT_LENGTH bytes; they arrive in their order.
 * SCI_ERR_NOSPC: the receiver's queue is full. SCI_ERR_OUT_OF_RANGE: the message is too long.
 */
SISCI_API_EXPORT void SCITriggerDataInterrupt(sci_remote_data_interrupt_t interrupt, void *data,
                                              unsigned int length, unsigned int flags,
                                              sci_error_t *error);

/*
 * An interrupt that an adapter makes of a store into a segment: SCI_ERR_NOT_SUPPORTED, as a store
 * is seen by nobody but the memory here.
 */
SISCI_API_EXPORT void SCIRegisterInterruptFlag(unsigned int localAdapterNo,
                                               sci_local_interrupt_t *interrupt,
                                               sci_local_segment_t segment, size_t offset,
                                               sci_cb_interrupt_t callback, void *callbackArg,
                                               unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIEnableConditionalInterrupt(sci_local_interrupt_t interrupt,
                                                    unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIDisableConditionalInterrupt(sci_local_interrupt_t interrupt,
                                                     unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIGetConditionalInterruptTrigCounter(sci_local_interrupt_t interrupt,
                                                            unsigned int *counter,
                                                            unsigned int flags,
                                                            sci_error_t *error);

#ifdef __cplusplus
}
#endif

#endif
