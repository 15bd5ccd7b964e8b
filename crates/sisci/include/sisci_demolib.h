/*
 * Helpers of SISCI's demo programs. They are not in libsisci.so: link with demolib.a as well.
 * Answers are SCI_ERR_OK or what SCIQuery said; data and the like are filled in on success.
 */
#ifndef SISCI_DEMOLIB_H
#define SISCI_DEMOLIB_H

#include "sisci_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* SCI_Q_ADAPTER and SCI_Q_SYSTEM with a subcommand. */
sci_error_t QueryAdapter(unsigned int subcommand, unsigned int localAdapterNo, unsigned int portNo,
                         unsigned int *data);
sci_error_t QuerySystem(unsigned int subcommand, unsigned int *data);

/* The first adapter that is there, and its node id. */
sci_error_t DetectFirstAdapterCard(unsigned int *localAdapterNo, unsigned int *localNodeId);

sci_error_t GetAdapterType(unsigned int localAdapterNo, unsigned int *type);
sci_error_t GetLocalNodeId(unsigned int localAdapterNo, unsigned int *nodeId);
sci_error_t GetAdapterSerialNumber(unsigned int localAdapterNo, unsigned int *serial);
sci_error_t GetHostbridgeType(unsigned int *type);
void PrintHostbridgeType(unsigned int type);
sci_error_t GetAPIVersionString(char str[], unsigned int length);

/* Frequencies of the 1.x hardware. */
sci_error_t GetAdapterIoBusFrequency(unsigned int localAdapterNo, unsigned int *frequency);
sci_error_t GetAdapterSciLinkFrequency(unsigned int localAdapterNo, unsigned int *frequency);
sci_error_t GetAdapterBlinkFrequency(unsigned int localAdapterNo, unsigned int *frequency);

/* Connects to the interrupt (waiting until it is there), triggers it, and disconnects. */
sci_error_t SendInterrupt(sci_desc_t sd, unsigned int localAdapterNo, unsigned int localNodeId,
                          unsigned int remoteNodeId, unsigned int interruptNo);

/* Makes an interrupt of this number, waits for it, and removes it. */
sci_error_t ReceiveInterrupt(sci_desc_t sd, unsigned int localAdapterNo, unsigned int localNodeId,
                             unsigned int interruptNo);

/* The four bytes in the opposite order. */
unsigned int EndianSwap(unsigned int value);

void SleepMilliseconds(int milliseconds);

#ifdef __cplusplus
}
#endif

#endif
