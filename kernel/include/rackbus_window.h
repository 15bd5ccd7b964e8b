/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The control area of a lent PCI function: what the lender's node and the
 * borrower's kernel module say to each other through window 1 of an NTB.
 *
 * It is plain memory of the lender, little endian, at offsets that are fixed
 * below.  The lender maps it at an IOVA to which its NTB translates the
 * borrower's accesses, so that the borrower finds it at some offset of its
 * window 1.  The borrower accesses it by naturally aligned loads and stores
 * of 4 bytes, and by a load of 8 bytes where two words are read as one (state
 * and heartbeat).
 *
 * All offsets in the header (configuration space, ring) count from the start
 * of the header, except those of BARs, which count from the start of window 1.
 * Whoever reads treats what it finds as hostile: reads it once, checks it, and
 * then uses what it read.
 *
 *
 * What the lender does
 * ====================
 *
 * Before the area is ready
 *
 *   - The device is reset.  Its memory decoding is on, and stays on until
 *     the function is taken away.  Bus mastering is off.
 *   - MSI-X is enabled in the device, and every entry of its table is masked
 *     (a lender by VFIO gives all vectors eventfds, and then masks the entries
 *     through the BAR).  The table is the borrower's from here on: the lender
 *     does not write it, but after a reset.
 *   - The device and the lender's NTB function are in one IOMMU domain, which
 *     has the lender's window 2 at dma_base, the lender's window 1 such that a
 *     write to msi_base + n reaches the borrower's 0xfee00000 + n (n below
 *     1 MiB), and the control area and BARs where the lender's NTB translates
 *     the borrower's accesses to.
 *   - The borrower's NTB translates accesses to its memory as the module has
 *     programmed it: window 1 leads to 0xfee00000 rounded down to the window's
 *     size, window 2 to address 0.  So, when the lender's window 1 is at IOVA
 *     M and has a size of S bytes, msi_base is M + (0xfee00000 & (S - 1)).
 *   - All fields are written, state last, with a release barrier before it.
 *     A new use of the function has a higher epoch.
 *
 * While it is ready
 *
 *   - heartbeat gets another value each RACKBUS_HEARTBEAT_MS milliseconds or
 *     more often.  One that stands still for half a second (by default) means
 *     that the lender is dead.
 *   - The ring is emptied when the doorbell rings, and each time that the
 *     heartbeat is written, as a doorbell may be lost.  Requests are carried
 *     out in their order; consumer is written after each.  One that has a
 *     wrong seq or epoch, or asks for what is not allowed, is passed over and
 *     counted in refused.
 *   - RACKBUS_REQUEST_WRITE says the new value of a register after the module
 *     has masked it; see enum rackbus_request for which there are.
 *   - After RACKBUS_REQUEST_RESET the device is as it was before the area was
 *     ready (memory decoding on, bus mastering off, MSI-X enabled, every entry
 *     masked) when consumer passes the request.  A device that cannot be reset
 *     is taken away: state becomes revoked.
 *
 * When it takes the function away
 *
 *   - state becomes revoked.  Then bus mastering is switched off, the windows
 *     are unmapped and the device is reset, in this order; the lender need not
 *     wait for the borrower.  A read of the borrower gives all ones then.
 *   - A device that is isolated is shown as revoked for a second when its bus
 *     mastering is off, before the windows are unmapped.  A borrower that has
 *     seen both, one after the other, knows that it reaches nothing any more.
 *   - The same place in window 1 leads to another function only when the
 *     borrower's node has said that its module has returned this one.
 */
#ifndef _RACKBUS_WINDOW_H
#define _RACKBUS_WINDOW_H

#include <linux/types.h>

#ifdef __KERNEL__
#include <linux/build_bug.h>
#include <linux/stddef.h>
#else
#include <assert.h>
#include <stddef.h>
#endif

#define RACKBUS_MAGIC		0x53554252u	/* "RBUS" */
#define RACKBUS_VERSION		1u

/* A control area starts at a multiple of this many bytes. */
#define RACKBUS_PAGE		4096u

#define RACKBUS_HEARTBEAT_MS	100u

#define RACKBUS_BARS		6
#define RACKBUS_MAX_VECTORS	2048u	/* that MSI-X may have */
#define RACKBUS_MIN_REQUESTS	16u	/* in the ring */
#define RACKBUS_MAX_REQUESTS	128u
#define RACKBUS_CONFIG_SIZE	4096u

/* The borrower rings none: the lender looks when it writes the heartbeat. */
#define RACKBUS_NO_DOORBELL	0xffffffffu

/* Where x86 has its local APICs; an MSI is a write to this 1 MiB. */
#define RACKBUS_MSI_ADDRESS	0xfee00000u
#define RACKBUS_MSI_SIZE	0x00100000u

enum rackbus_window_state {
	RACKBUS_WINDOW_NONE	= 0,	/* nothing is lent here */
	RACKBUS_WINDOW_READY	= 1,	/* all else is valid */
	RACKBUS_WINDOW_REVOKED	= 2,	/* was lent, and is not any more */
};

/* Flags of the header. */
/*
 * The lender's window 2 reaches the borrower's memory by physical address and
 * not through the borrower's IOMMU (the NTB in software is such a one).  The
 * module refuses to borrow when its NTB's DMA is translated.
 */
#define RACKBUS_DIRECT		0x00000001u

/* Flags of a BAR. */
#define RACKBUS_BAR_PRESENT	0x00000001u	/* memory; ports are not lent */
#define RACKBUS_BAR_64		0x00000002u	/* takes the next one's place */
#define RACKBUS_BAR_PREFETCH	0x00000004u

struct rackbus_window_bar {
	__le64 offset;		/* in window 1: a multiple of 4 KiB and of size */
	__le64 size;		/* a power of two, 16 or more */
	__le32 flags;
	__le32 reserved;
};

/* The first page. Written by the lender alone. */
struct rackbus_window_header {
	__le32 magic;
	__le32 version;
	__le64 epoch;		/* of the lease */
	__le32 state;		/* enum rackbus_window_state; read together */
	__le32 heartbeat;	/* with this */
	__le32 flags;
	__le32 vectors;		/* MSI-X vectors of the device; 0: none */
	__le64 dma_base;	/* the device reaches borrower address x */
	__le64 dma_size;	/* below this size at dma_base + x */
	__le64 msi_base;	/* and the borrower's 0xfee00000 here */
	__le32 config_offset;	/* a page: configuration space as it is shown */
	__le32 ring_offset;	/* a page: struct rackbus_window_ring */
	__le32 ring_entries;	/* a power of two */
	__le32 doorbell;	/* that the borrower rings: 0 to 31, or none */
	__le32 mappings;	/* that the lender makes at most; 0: none */
	__le32 reserved0;
	__le64 mapped_msi_base;	/* 0xfee00000 while the function is isolated */
	__le32 reserved1[2];
	struct rackbus_window_bar bars[RACKBUS_BARS];
};

/*
 * Configuration space is an image that the lender writes before the area is
 * ready, and that does not change.  It is of type 0 and has the device's
 * identity, and MSI-X (table and pending bits in BARs that are present) when
 * vectors is not 0.  The module reads its first 268 bytes.  BARs, the command
 * and status registers and the state of MSI-X are not taken from it.  What the
 * module shows its host are the capabilities
 *
 *   - PCI Express: as an integrated endpoint, without link.  Function-level
 *     reset should be said to be there when the lender can reset the device in
 *     any way, as the module asks for it by RACKBUS_REQUEST_RESET;
 *   - MSI-X: with as many vectors as the borrower has for the function;
 *   - vendor-specific, of 4 to 255 bytes, read-only;
 *   - extended: the device's serial number, which the lender puts at 0x100.
 *
 * Others are hidden by the module, and better not in the image at all: MSI,
 * power management, VPD, AER, SR-IOV, ATS, PRI, PASID, TPH, resizable BARs.
 * What belongs to no capability reads as in the image (as 0 from 0x10c on) and
 * ignores writes.
 */
#define RACKBUS_CONFIG_READ	0x10cu

enum rackbus_request {
	/*
	 * A register has this value now.  The registers are:
	 *
	 *   0x04, 2 bytes: command.  The lender carries out bus master (bit 2);
	 *     memory space (bit 1) and interrupt disable (bit 10) are for its
	 *     information.  The module waits for consumer when bus master is
	 *     switched on, for 100 ms at most (by default): the driver uses the
	 *     device next.
	 *   MSI-X capability + 2, 2 bytes: enable (bit 15) and function mask
	 *     (bit 14).  For the lender's information: a device must not lose
	 *     what the borrower has written to the table meanwhile.
	 *   PCI Express capability + 8, 2 bytes: device control.  The lender
	 *     carries out relaxed ordering (bit 4), no snoop (bit 11) and the
	 *     read request size (bits 14:12).
	 */
	RACKBUS_REQUEST_WRITE	= 1,
	/* Reset the device; offset, size and value are 0. */
	RACKBUS_REQUEST_RESET	= 2,
	/*
	 * The borrower's host has let the function go, or could not borrow
	 * it: no driver has it, and none uses the windows.  The lender resets
	 * the device, as for RACKBUS_REQUEST_RESET.  The same epoch may be
	 * borrowed again when consumer has passed the request, while the area
	 * is ready.
	 */
	RACKBUS_REQUEST_RELEASE	= 3,
	/*
	 * Value 1 isolates the function: it reaches nothing of the borrower's
	 * memory but what is mapped from then on, and its interrupts, by
	 * mapped_msi_base.  Value 0 has it reach all of the window again, as at
	 * the beginning.  In between it is reset, as for RACKBUS_REQUEST_RESET,
	 * and no mapping is left.  Offset and size are 0.
	 */
	RACKBUS_REQUEST_ISOLATE	= 4,
	/*
	 * Value 1 makes the mapping that the ring's page describes, value 0
	 * takes the one away that begins and ends as it says.  Only of a
	 * function that is isolated.  Offset and size are 0.
	 */
	RACKBUS_REQUEST_MAP	= 5,
};

struct rackbus_window_request {
	__le32 seq;		/* producer, before this entry was added */
	__le32 what;		/* kind | size << 8 | offset << 16 */
	__le32 value;
	__le32 epoch;		/* the low half */
};

/* Of a mapping: what the device may do there. */
#define RACKBUS_MAP_READ	0x00000001u
#define RACKBUS_MAP_WRITE	0x00000002u

/*
 * What RACKBUS_REQUEST_MAP is about, and what came of it and of
 * RACKBUS_REQUEST_ISOLATE.  The borrower has one such request under way at a
 * time: it writes all of this, with a result of all ones, before the request,
 * and reads the result when consumer has passed it.
 */
struct rackbus_window_mapping {
	__le64 iova;		/* where the device finds it */
	__le64 address;		/* in the borrower's memory */
	__le64 size;		/* all three are multiples of 4 KiB */
	__le32 access;		/* RACKBUS_MAP_READ and RACKBUS_MAP_WRITE */
	__le32 result;		/* by the lender: 0, or an error number */
};

/*
 * Requests of the borrower.  producer and consumer only grow (modulo 2^32),
 * entry n is entries[n % ring_entries], and the ring is empty when they are
 * equal.  The borrower writes an entry, then producer, then rings the doorbell
 * by writing 1 to its NTB's register; PCI Express keeps these in order.  When
 * the ring is full it reads consumer again, for 100 ms at most (by default; a
 * second for a release), and then counts the request as lost; the register
 * keeps its old value.
 */
struct rackbus_window_ring {
	__le32 producer;	/* written by the borrower */
	__le32 reserved0[15];
	__le32 consumer;	/* written by the lender */
	__le32 refused;		/* by the lender: requests passed over */
	__le32 reserved1[14];
	struct rackbus_window_request entries[RACKBUS_MAX_REQUESTS];
	__le32 reserved2[32];
	struct rackbus_window_mapping mapping;
};

#define RACKBUS_AT(type, field, offset) \
	static_assert(offsetof(type, field) == (offset), #field)

RACKBUS_AT(struct rackbus_window_bar, offset, 0x00);
RACKBUS_AT(struct rackbus_window_bar, size, 0x08);
RACKBUS_AT(struct rackbus_window_bar, flags, 0x10);
static_assert(sizeof(struct rackbus_window_bar) == 0x18, "bar");

RACKBUS_AT(struct rackbus_window_header, magic, 0x00);
RACKBUS_AT(struct rackbus_window_header, version, 0x04);
RACKBUS_AT(struct rackbus_window_header, epoch, 0x08);
RACKBUS_AT(struct rackbus_window_header, state, 0x10);
RACKBUS_AT(struct rackbus_window_header, heartbeat, 0x14);
RACKBUS_AT(struct rackbus_window_header, flags, 0x18);
RACKBUS_AT(struct rackbus_window_header, vectors, 0x1c);
RACKBUS_AT(struct rackbus_window_header, dma_base, 0x20);
RACKBUS_AT(struct rackbus_window_header, dma_size, 0x28);
RACKBUS_AT(struct rackbus_window_header, msi_base, 0x30);
RACKBUS_AT(struct rackbus_window_header, config_offset, 0x38);
RACKBUS_AT(struct rackbus_window_header, ring_offset, 0x3c);
RACKBUS_AT(struct rackbus_window_header, ring_entries, 0x40);
RACKBUS_AT(struct rackbus_window_header, doorbell, 0x44);
RACKBUS_AT(struct rackbus_window_header, mappings, 0x48);
RACKBUS_AT(struct rackbus_window_header, mapped_msi_base, 0x50);
RACKBUS_AT(struct rackbus_window_header, bars, 0x60);
static_assert(sizeof(struct rackbus_window_header) == 0xf0, "header");

static_assert(sizeof(struct rackbus_window_request) == 0x10, "request");
RACKBUS_AT(struct rackbus_window_ring, producer, 0x00);
RACKBUS_AT(struct rackbus_window_ring, consumer, 0x40);
RACKBUS_AT(struct rackbus_window_ring, refused, 0x44);
RACKBUS_AT(struct rackbus_window_ring, entries, 0x80);
RACKBUS_AT(struct rackbus_window_ring, mapping, 0x900);
static_assert(sizeof(struct rackbus_window_ring) <= RACKBUS_PAGE, "ring");

RACKBUS_AT(struct rackbus_window_mapping, iova, 0x00);
RACKBUS_AT(struct rackbus_window_mapping, address, 0x08);
RACKBUS_AT(struct rackbus_window_mapping, size, 0x10);
RACKBUS_AT(struct rackbus_window_mapping, access, 0x18);
RACKBUS_AT(struct rackbus_window_mapping, result, 0x1c);
static_assert(sizeof(struct rackbus_window_mapping) == 0x20, "mapping");

#endif /* _RACKBUS_WINDOW_H */
