/*
 * Borrowed devices (SmartIO) and requesters of this host, in the newest form of their prototypes.
 * Included by sisci_api.h, which tells the conventions.
 *
 * On rackbus, a device is lent whole, to a stock driver, with `rackbus borrow`. So all of these
 * answer SCI_ERR_NOT_SUPPORTED; they are here so that programs which can do without are built. The
 * comments say what the functions are for.
 *
 * A device is known by its fabric device id (fdid). Who borrowed it reaches its registers as a
 * segment, and lets it reach segments at addresses on its own bus.
 */
#ifndef SISCI_API_DEVICES_H
#define SISCI_API_DEVICES_H

#include "sisci_api_macros.h"
#include "sisci_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Lets a function of this host (bus, device and function) reach the fabric. flags:
 * PCIE_REQUESTER_GLOBAL. */
SISCI_API_EXPORT void SCIRegisterPCIeRequester(sci_desc_t sd, unsigned int localAdapterNo,
                                               unsigned int bus, unsigned int devfn,
                                               unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIUnregisterPCIeRequester(sci_desc_t sd, unsigned int localAdapterNo,
                                                 unsigned int bus, unsigned int devfn,
                                                 unsigned int flags, sci_error_t *error);

/*
 * Fills in the ids of at most max devices that are like filter where it is not zero (NULL: all),
 * and answers how many there are.
 */
SISCI_API_EXPORT size_t SCIGetDeviceList(sci_desc_t sd, unsigned long long *fdids, size_t max,
                                         const sci_smartio_device_info_t *filter,
                                         unsigned int flags, sci_error_t *error);

/* Borrows a device. flags: EXCLUSIVE. SCI_ERR_NO_SUCH_FDID. SCI_ERR_BUSY: somebody has it. */
SISCI_API_EXPORT void SCIBorrowDevice(sci_desc_t sd, sci_smartio_device_t *device,
                                      unsigned long long fdid, unsigned int flags,
                                      sci_error_t *error);
SISCI_API_EXPORT void SCIReturnDevice(sci_smartio_device_t device, unsigned int flags,
                                      sci_error_t *error);

/* Keeps the device and lets others borrow it too. */
SISCI_API_EXPORT void SCIReleaseExclusiveBorrow(sci_smartio_device_t device, unsigned int flags,
                                                sci_error_t *error);

/* The id of a borrowed device. 0 for a handle that is not valid. */
SISCI_API_EXPORT unsigned long long SCIGetFabricDeviceId(sci_smartio_device_t device);

/* Connects to memory of the device: type is SCI_MEMTYPE_BAR (id: which), _PRIVATE or _SHARED. */
SISCI_API_EXPORT void SCIConnectDeviceSegment(sci_smartio_device_t device,
                                              sci_remote_segment_t *segment, unsigned int id,
                                              unsigned int type, sci_cb_remote_segment_t callback,
                                              void *callbackArg, unsigned int flags,
                                              sci_error_t *error);

/* The same by a way of the caller's choice. Ours. flags: SPECIFY_PATH. */
SISCI_API_EXPORT void SCIConnectDeviceSegmentPath(sci_smartio_device_t device,
                                                  sci_remote_segment_t *segment, unsigned int id,
                                                  unsigned int type, unsigned int localAdapterNo,
                                                  sci_cb_remote_segment_t callback,
                                                  void *callbackArg, unsigned int flags,
                                                  sci_error_t *error);

/* An older name: connects to a BAR. reserved: 0. flags: BAR. */
SISCI_API_EXPORT void SCIConnectDeviceMemory(sci_desc_t sd, sci_remote_segment_t *segment,
                                             unsigned int localAdapterNo,
                                             sci_smartio_device_t device, unsigned int segmentNo,
                                             unsigned int reserved, unsigned int flags,
                                             sci_error_t *error);

/* Makes memory for a device, placed by SCI_MEMTYPE_* and by who uses it (SCI_MEMACCESS_*). */
SISCI_API_EXPORT void SCICreateDeviceSegment(sci_smartio_device_t device, unsigned int id,
                                             size_t size, unsigned int memType,
                                             unsigned int accessHints, unsigned int flags,
                                             sci_error_t *error);

/* Lets a device reach a part of a segment; ioaddr receives where the device sees it. */
SISCI_API_EXPORT void SCIMapLocalSegmentForDevice(sci_local_segment_t segment,
                                                  unsigned int localAdapterNo,
                                                  sci_smartio_device_t device,
                                                  sci_ioaddr_t *ioaddr, size_t offset,
                                                  size_t size, unsigned int flags,
                                                  sci_error_t *error);
SISCI_API_EXPORT void SCIMapRemoteSegmentForDevice(sci_remote_segment_t segment,
                                                   sci_smartio_device_t device,
                                                   sci_ioaddr_t *ioaddr, size_t offset,
                                                   size_t size, unsigned int flags,
                                                   sci_error_t *error);
SISCI_API_EXPORT void SCIUnmapLocalSegmentForDevice(sci_local_segment_t segment,
                                                    unsigned int localAdapterNo,
                                                    sci_smartio_device_t device,
                                                    unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIUnmapRemoteSegmentForDevice(sci_remote_segment_t segment,
                                                     sci_smartio_device_t device,
                                                     unsigned int flags, sci_error_t *error);

#ifdef __cplusplus
}
#endif

#endif
