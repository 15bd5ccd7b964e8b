/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * /dev/rackbus: borrowing PCI functions of other hosts through NTBs.
 *
 * The device is for the borrower's node, which is root.  Functions belong to
 * the module, not to the descriptor by which they were borrowed: closing it
 * returns nothing, and a node that starts anew finds them by RACKBUS_LIST.
 *
 * poll() says POLLIN, and read() gives a __u64, when some function's state has
 * changed since this descriptor was read (or opened): the number of changes so
 * far.  What has changed, RACKBUS_LIST and RACKBUS_STATUS say.
 *
 * Fields and flags that are reserved are 0; others are refused with EINVAL.
 */
#ifndef _UAPI_LINUX_RACKBUS_H
#define _UAPI_LINUX_RACKBUS_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define RACKBUS_API_VERSION	1

#define RACKBUS_NAME_SIZE	64	/* with the NUL at its end */
#define RACKBUS_NTB_VECTORS	32	/* of one NTB, shared by its functions */
#define RACKBUS_MAX_FUNCTIONS	64	/* borrowed at once */

/* A function of this host by its address: 0000:3b:00.1 has devfn 0x01. */
struct rackbus_address {
	__u32 domain;
	__u8 bus;
	__u8 devfn;
	__u16 reserved;
};

/*
 * Makes a lent function appear in this host's PCI tree, as device 00.0 on bus
 * 0 of a domain of its own.  Drivers bind to it before the call returns.
 *
 * ENODEV  no such NTB, or it is not bound to this module
 * ENOLINK the NTB's link is down; it needs a moment when both ends are enabled
 * ESHUTDOWN  the NTB is closed, as a lender did not say that a device of its
 *         reaches memory no more; it is open again when it is bound anew
 * EAGAIN  the lender still resets it for its last user, which needs a moment
 * ENXIO   nothing is lent there: the area is not ready, or has no magic
 * ESTALE  the area is of another epoch
 * EPROTO  what the lender says is wrong; the kernel's log says what
 * EEXIST  the area overlaps that of a function that is borrowed already
 * ENOSPC  the NTB has no vector left, or too many functions are borrowed
 * EPERM   the window passes by this host's IOMMU, which is on for the NTB
 * ERANGE  the device cannot reach this host's memory through the window, or
 *         less of it than functions that are borrowed through this NTB
 */
struct rackbus_borrow {
	struct rackbus_address ntb;
	__u64 offset;		/* of the control area in window 1 */
	__u64 epoch;		/* of the lease */
	__u32 vectors;		/* interrupts it may have; 0: 8 */
	__u32 flags;
	__u8 name[RACKBUS_NAME_SIZE];	/* of the lease, for messages */
	__u32 handle;		/* out: never used again */
	__u32 domain;		/* out: the PCI domain */
};

/* Return although block devices that go with the function are open. */
#define RACKBUS_RETURN_FORCE	0x00000001u

/*
 * Unbinds the function's driver, takes the function away and forgets it.  Of a
 * function that is lost already it forgets what is left.
 *
 * ENOENT    no such handle
 * EBUSY     block devices that go with the function are open (mounted, say)
 *           after timeout_ms; the function stays
 * ETIMEDOUT the driver has not let go after timeout_ms; the function goes away
 *           when it does, and is forgotten by another RACKBUS_RETURN
 */
struct rackbus_return {
	__u32 handle;
	__u32 flags;
	__u32 timeout_ms;	/* 0: 10 seconds; at most 10 minutes */
	__u32 reserved;
};

/*
 * The function's lender is gone, the node says: its driver is told so and it
 * is taken away as by surprise, without waiting.  The handle remains until it
 * is returned.  0 too when it was lost already.
 */
struct rackbus_lost {
	__u32 handle;
	__u32 reserved;
};

/* All handles, ascending.  total may be more than what capacity has room for. */
struct rackbus_list {
	__u32 capacity;
	__u32 total;		/* out */
	__u64 handles;		/* pointer to capacity times __u32 */
};

enum rackbus_state {
	RACKBUS_STATE_BORROWED	= 1,
	RACKBUS_STATE_RETURNING	= 2,	/* its driver is letting go */
	RACKBUS_STATE_LOSING	= 3,	/* the same, but the device is gone */
	RACKBUS_STATE_LOST	= 4,	/* away, and to be returned */
	RACKBUS_STATE_RETURNED	= 5,	/* away after ETIMEDOUT, the same */
};

enum rackbus_reason {
	RACKBUS_REASON_NONE		= 0,
	RACKBUS_REASON_LINK		= 1,	/* the NTB's link is down */
	RACKBUS_REASON_HEARTBEAT	= 2,	/* stood still */
	RACKBUS_REASON_REVOKED		= 3,	/* the lender said so */
	RACKBUS_REASON_UNREACHABLE	= 4,	/* reads give all ones */
	RACKBUS_REASON_TOLD		= 5,	/* RACKBUS_LOST */
	RACKBUS_REASON_NTB		= 6,	/* the NTB was unbound */
	RACKBUS_REASON_SILENT		= 7,	/* no answer about its memory */
};

struct rackbus_status {
	__u32 handle;		/* in */
	__u32 state;		/* enum rackbus_state */
	__u32 reason;		/* enum rackbus_reason */
	__u32 domain;
	struct rackbus_address ntb;
	__u64 offset;
	__u64 epoch;
	__u64 dma_base;
	__u64 dma_size;
	__u32 vectors;		/* that the function has */
	__u32 silent_ms;	/* since the heartbeat was seen to change */
	__u32 removal_ms;	/* from the loss noticed to the function away */
	__u32 reserved;
	__u8 name[RACKBUS_NAME_SIZE];
	/* Counters since it was borrowed. */
	__u64 heartbeats;	/* looks at it */
	__u64 heartbeats_missed;	/* that found it unchanged */
	__u64 writes_forwarded;	/* to configuration space */
	__u64 writes_lost;	/* the ring was full */
	__u64 writes_refused;	/* by the lender */
	__u64 waits_late;	/* bus master not on in time */
	__u64 resets;
	__u64 dma_refused;	/* addresses outside of the window */
	__u64 interrupts_stray;	/* that no driver had set up */
	__u64 interrupts[RACKBUS_NTB_VECTORS];
};

#define RACKBUS_IOC		0xbc

/* The API's version; one that has another is another API. */
#define RACKBUS_VERSION_GET	_IOR(RACKBUS_IOC, 0x00, __u32)
#define RACKBUS_BORROW		_IOWR(RACKBUS_IOC, 0x01, struct rackbus_borrow)
#define RACKBUS_RETURN		_IOW(RACKBUS_IOC, 0x02, struct rackbus_return)
#define RACKBUS_LOST		_IOW(RACKBUS_IOC, 0x03, struct rackbus_lost)
#define RACKBUS_LIST		_IOWR(RACKBUS_IOC, 0x04, struct rackbus_list)
#define RACKBUS_STATUS		_IOWR(RACKBUS_IOC, 0x05, struct rackbus_status)

#endif /* _UAPI_LINUX_RACKBUS_H */
