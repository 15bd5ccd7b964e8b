/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What a lender says of a function in its control area, checked; and the ring
 * of requests as arithmetic.  No hardware here: the caller has read the area.
 */
#ifndef _RACKBUS_WINDOW_CHECK_H
#define _RACKBUS_WINDOW_CHECK_H

#include "pure.h"

/* Swiotlb and memory below 16 MiB must be in the window, or nothing can be. */
#define RACKBUS_MIN_DMA		0x1000000ull

struct rackbus_bar {
	u64 offset;		/* in window 1 */
	u64 size;		/* 0: there is none */
	bool is_64;
	bool prefetch;
};

/* A function that is lent, as its control area has it. */
struct rackbus_offer {
	u64 area;		/* offset of the control area in window 1 */
	u64 epoch;
	u32 heartbeat;
	bool direct;
	u32 vectors;
	u64 dma_base;
	u64 dma_size;
	u64 msi_base;
	u32 mappings;		/* 0: it cannot be isolated */
	u64 mapped_msi_base;
	u32 config_offset;
	u32 ring_offset;
	u32 ring_entries;
	u32 doorbell;
	struct rackbus_bar bars[RACKBUS_BARS];
};

/* The bytes of window 1 that a range of this many bytes keeps others from. */
static inline u64 rackbus_span(u64 size)
{
	return max_t(u64, size, RACKBUS_PAGE);
}

/*
 * Checks a header that was copied from a window of that many bytes.  0, or a
 * negative error number as RACKBUS_BORROW has them, and then why.
 */
int rackbus_offer_check(const struct rackbus_window_header *raw, u64 area,
			u64 window, u64 epoch, struct rackbus_offer *offer,
			const char **why);

/* Whether two functions of one window use some byte of it both. */
bool rackbus_offers_overlap(const struct rackbus_offer *one,
			    const struct rackbus_offer *other);

/* Whether one more request fits. A consumer that is nonsense leaves no room. */
static inline bool rackbus_ring_room(u32 producer, u32 consumer, u32 entries)
{
	return producer - consumer < entries;
}

/* Whether the lender has carried out all before this request's successor. */
static inline bool rackbus_ring_passed(u32 consumer, u32 after)
{
	return (s32)(consumer - after) >= 0;
}

/*
 * Whether a ring can be gone on with that was found so.  -EAGAIN: the lender is
 * still carrying out what the function's former user has asked for, its reset
 * among it.  -EPROTO: it is nonsense.
 */
static inline int rackbus_ring_idle(u32 producer, u32 consumer, u32 entries)
{
	if (producer - consumer > entries)
		return -EPROTO;
	return producer == consumer ? 0 : -EAGAIN;
}

/*
 * Whether nobody has the function in this epoch, of a ring whose last request is
 * this: whoever has lost it has not said that it is released.
 */
static inline bool
rackbus_ring_released(u32 producer, const struct rackbus_window_request *last)
{
	return !producer ||
	       ((le32_to_cpu(last->what) & 0xff) == RACKBUS_REQUEST_RELEASE &&
		le32_to_cpu(last->seq) == producer - 1);
}

/*
 * What the lender says of a request that it has passed: 0, or negative.  Never
 * -EAGAIN, which is that it has not passed it yet.
 */
static inline int rackbus_result(u32 result)
{
	return result < 4096 && result != EAGAIN ? -(int)result : -EPROTO;
}

struct rackbus_window_request rackbus_ring_entry(u32 seq, u32 kind, u32 size,
						 u32 offset, u32 value,
						 u64 epoch);

/* Whether size bytes at address are below limit. */
static inline bool rackbus_inside(u64 address, u64 size, u64 limit)
{
	return address < limit && size <= limit - address;
}

#endif /* _RACKBUS_WINDOW_CHECK_H */
