/*
 * Borrowed devices (SmartIO) and requesters of this host, in the newest form of their prototypes.
 * Included by sisci_api.h, which tells the conventions.
 *
 * A device is known by its fabric device id (fdid). Who borrowed it reaches its registers as a
 * segment, and lets it reach segments at addresses on its own bus.
 *
 * On rackbus, a program borrows by a lease as every other user: `rackbus leases` shows it, and it ends
 * with the program. A device is lent to one at a time. It is reset when it is borrowed, with memory
 * space and bus mastering on. When its lease is ended or its lender is lost, its registers read all
 * ones, it reaches no memory of the program's any more, and the next call about it answers
 * SCI_ERR_NOT_CONNECTED. There are no interrupts in this part of the API: programs poll.
 *
 * SCI_ERR_NOT_SUPPORTED: with a number, libsisci says on stderr why something cannot be had.
 *
 * With RACKBUS_ISOLATION=strict in a program's environment, lenders get no memory of its host's: the
 * device's controller then runs here. Then, and between machines, devices do not reach each other.
 */
#ifndef SISCI_API_DEVICES_H
#define SISCI_API_DEVICES_H

#include "sisci_api_macros.h"
#include "sisci_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Not supported: it is for an adapter's hardware. Lets a function of this host (bus, device and function) reach the fabric. flags:
 * PCIE_REQUESTER_GLOBAL. */
SISCI_API_EXPORT void SCIRegisterPCIeRequester(sci_desc_t sd, unsigned int localAdapterNo,
                                               unsigned int bus, unsigned int devfn,
                                               unsigned int flags, sci_error_t *error);
SISCI_API_EXPORT void SCIUnregisterPCIeRequester(sci_desc_t sd, unsigned int localAdapterNo,
                                                 unsigned int bus, unsigned int devfn,
                                                 unsigned int flags, sci_error_t *error);

/*
 * Fills in the ids of at most max devices that are like filter where it is not zero (NULL: all), and
 * answers how many it filled in; where fdids is NULL, how many there are. What a device is known by
 * before it is borrowed: fdid, nodeid, user_name (its name in the rack, HOST/DEVICE) and, but for
 * functions of other programs and physical ones, PCI ids and class. A filter with anything else is
 * like no device.
 */
SISCI_API_EXPORT size_t SCIGetDeviceList(sci_desc_t sd, unsigned long long *fdids, size_t max,
                                         const sci_smartio_device_info_t *filter,
                                         unsigned int flags, sci_error_t *error);

/*
 * Borrows a device. flags: EXCLUSIVE, which it is without the flag, too. SCI_ERR_NO_SUCH_FDID.
 * SCI_ERR_BUSY: somebody has it. SCI_ERR_NOSPC: the program has 64.
 * SCIReturnDevice: SCI_ERR_BUSY while the program is connected to its memory, or has mapped memory for
 * it.
 */
SISCI_API_EXPORT void SCIBorrowDevice(sci_desc_t sd, sci_smartio_device_t *device,
                                      unsigned long long fdid, unsigned int flags,
                                      sci_error_t *error);
SISCI_API_EXPORT void SCIReturnDevice(sci_smartio_device_t device, unsigned int flags,
                                      sci_error_t *error);

/* Not supported: keeps the device and lets others borrow it too. */
SISCI_API_EXPORT void SCIReleaseExclusiveBorrow(sci_smartio_device_t device, unsigned int flags,
                                                sci_error_t *error);

/* The id of a borrowed device. 0 for a handle that is not valid. */
SISCI_API_EXPORT unsigned long long SCIGetFabricDeviceId(sci_smartio_device_t device);

/*
 * Connects to memory of the device. type is SCI_MEMTYPE_BAR: id is which; or _PRIVATE or _SHARED: id is
 * what SCICreateDeviceSegment was given. The segment is mapped as every remote segment.
 *
 * A BAR that is memory can be used so, and the registers of an NVMe drive, as plain memory that its
 * controller looks at: INTMS and INTMC are not looked at. Others: SCI_ERR_NOT_SUPPORTED. No such BAR or
 * segment: SCI_ERR_NO_SUCH_SEGMENT. flags: USE_CALLBACK answers SCI_ERR_FLAG_NOT_IMPLEMENTED.
 */
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

/*
 * Makes memory for a device, as SCI_MEMTYPE_PRIVATE or _SHARED; accessHints (SCI_MEMACCESS_*) say who
 * uses it. It is on this host and goes when the device is returned. SCI_ERR_SEGMENTID_USED: this device
 * has one of that id. flags: LOCAL_ONLY, DEVICE_PREFER_BANDWIDTH, HOST_PREFER_BANDWIDTH;
 * DEVICE_SIDE_ONLY answers SCI_ERR_NOT_SUPPORTED: its host gives a borrower no memory.
 */
SISCI_API_EXPORT void SCICreateDeviceSegment(sci_smartio_device_t device, unsigned int id,
                                             size_t size, unsigned int memType,
                                             unsigned int accessHints, unsigned int flags,
                                             sci_error_t *error);

/*
 * Lets a device reach a part of a segment; ioaddr receives where the device sees it. The device reaches
 * whole pages: all of those that have a byte of the part. A remote segment is one of another host, memory
 * of a device, or another borrowed device's BAR that is memory: peer-to-peer. Several parts of one
 * segment may be mapped; unmapping takes all of them. The segment is not removed or disconnected
 * before: SCI_ERR_BUSY. Memory that is read-only for the program is so for the device. While a segment's owner
 * withdraws it from others, its memory moves, and a transfer of the device to it meanwhile fails.
 * Between machines what a device stores to a remote segment is at its owner's after SCIFlush.
 */
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
