// SPDX-License-Identifier: GPL-2.0
/*
 * Checks what a lender says of a function.  All of it may be wrong on purpose.
 */
#include "window.h"

static int refuse(const char **why, const char *text, int error)
{
	*why = text;
	return error;
}

static bool overlap(u64 a, u64 a_size, u64 b, u64 b_size)
{
	return a < b + b_size && b < a + a_size;
}

/*
 * The ranges of window 1 that a function uses: header, configuration space,
 * ring, BARs.  They were checked to be inside of the window before.
 */
#define RANGES (3 + RACKBUS_BARS)

static u64 range(const struct rackbus_offer *offer, unsigned int n, u64 *start)
{
	*start = offer->area;
	switch (n) {
	case 0:
		return RACKBUS_PAGE;
	case 1:
		*start += offer->config_offset;
		return RACKBUS_PAGE;
	case 2:
		*start += offer->ring_offset;
		return RACKBUS_PAGE;
	}
	*start = offer->bars[n - 3].offset;
	return offer->bars[n - 3].size ? rackbus_span(offer->bars[n - 3].size) : 0;
}

static bool ranges_overlap(const struct rackbus_offer *one, unsigned int n,
			   const struct rackbus_offer *other, unsigned int m)
{
	u64 a, b;
	u64 a_size = range(one, n, &a);
	u64 b_size = range(other, m, &b);

	return a_size && b_size && overlap(a, a_size, b, b_size);
}

bool rackbus_offers_overlap(const struct rackbus_offer *one,
			    const struct rackbus_offer *other)
{
	unsigned int n, m;

	for (n = 0; n < RANGES; n++)
		for (m = 0; m < RANGES; m++)
			if (ranges_overlap(one, n, other, m))
				return true;
	return false;
}

static bool overlaps_itself(const struct rackbus_offer *offer)
{
	unsigned int n, m;

	for (n = 0; n < RANGES; n++)
		for (m = n + 1; m < RANGES; m++)
			if (ranges_overlap(offer, n, offer, m))
				return true;
	return false;
}

/* The fields that say that this is a control area, and whose. */
static int check_identity(const struct rackbus_window_header *raw, u64 epoch,
			  struct rackbus_offer *offer, const char **why)
{
	if (le32_to_cpu(raw->magic) != RACKBUS_MAGIC)
		return refuse(why, "no control area is there", -ENXIO);
	if (le32_to_cpu(raw->version) != RACKBUS_VERSION)
		return refuse(why, "the control area has another version",
			      -EPROTO);
	if (le32_to_cpu(raw->state) != RACKBUS_WINDOW_READY)
		return refuse(why, "nothing is lent there", -ENXIO);
	offer->epoch = le64_to_cpu(raw->epoch);
	if (offer->epoch != epoch)
		return refuse(why, "lent in another epoch", -ESTALE);
	offer->heartbeat = le32_to_cpu(raw->heartbeat);
	if (le32_to_cpu(raw->flags) & ~RACKBUS_DIRECT)
		return refuse(why, "flags that are not known", -EPROTO);
	offer->direct = le32_to_cpu(raw->flags) & RACKBUS_DIRECT;
	offer->vectors = le32_to_cpu(raw->vectors);
	if (offer->vectors > RACKBUS_MAX_VECTORS)
		return refuse(why, "more vectors than MSI-X has", -EPROTO);
	return 0;
}

/* How the device reaches this host. */
static int check_ways(const struct rackbus_window_header *raw,
		      struct rackbus_offer *offer, const char **why)
{
	offer->dma_base = le64_to_cpu(raw->dma_base);
	offer->dma_size = le64_to_cpu(raw->dma_size);
	if (offer->dma_size < RACKBUS_MIN_DMA)
		return refuse(why, "the window onto memory is below 16 MiB",
			      -ERANGE);
	if (offer->dma_base & (RACKBUS_PAGE - 1) ||
	    offer->dma_size & (RACKBUS_PAGE - 1) ||
	    offer->dma_base + offer->dma_size - 1 < offer->dma_base)
		return refuse(why, "the window onto memory is at no address",
			      -EPROTO);
	offer->msi_base = le64_to_cpu(raw->msi_base);
	if (offer->msi_base & (RACKBUS_MSI_SIZE - 1))
		return refuse(why, "msi_base is no multiple of 1 MiB", -EPROTO);
	offer->mappings = le32_to_cpu(raw->mappings);
	offer->mapped_msi_base = le64_to_cpu(raw->mapped_msi_base);
	if (offer->mapped_msi_base & (RACKBUS_MSI_SIZE - 1))
		return refuse(why, "mapped_msi_base is no multiple of 1 MiB",
			      -EPROTO);
	return 0;
}

/* A page that the header names by its distance. */
static bool page_inside(u32 offset, u64 area, u64 window)
{
	return !(offset & (RACKBUS_PAGE - 1)) &&
	       rackbus_inside(offset, RACKBUS_PAGE, window - area);
}

static int check_pages(const struct rackbus_window_header *raw, u64 window,
		       struct rackbus_offer *offer, const char **why)
{
	offer->config_offset = le32_to_cpu(raw->config_offset);
	offer->ring_offset = le32_to_cpu(raw->ring_offset);
	if (!page_inside(offer->config_offset, offer->area, window) ||
	    !page_inside(offer->ring_offset, offer->area, window))
		return refuse(why, "configuration space or ring is outside of the window",
			      -EPROTO);
	offer->ring_entries = le32_to_cpu(raw->ring_entries);
	if (!is_power_of_2(offer->ring_entries) ||
	    offer->ring_entries < RACKBUS_MIN_REQUESTS ||
	    offer->ring_entries > RACKBUS_MAX_REQUESTS)
		return refuse(why, "the ring has no such size", -EPROTO);
	offer->doorbell = le32_to_cpu(raw->doorbell);
	if (offer->doorbell > 31 && offer->doorbell != RACKBUS_NO_DOORBELL)
		return refuse(why, "there is no such doorbell", -EPROTO);
	return 0;
}

static int check_bar(const struct rackbus_window_bar *raw, u64 window,
		     struct rackbus_bar *bar, const char **why)
{
	u32 flags = le32_to_cpu(raw->flags);
	u64 offset = le64_to_cpu(raw->offset);
	u64 size = le64_to_cpu(raw->size);

	if (!(flags & RACKBUS_BAR_PRESENT))
		return 0;
	if (flags & ~(RACKBUS_BAR_PRESENT | RACKBUS_BAR_64 |
		      RACKBUS_BAR_PREFETCH))
		return refuse(why, "a BAR has flags that are not known",
			      -EPROTO);
	if (!is_power_of_2(size) || size < 16)
		return refuse(why, "a BAR has no such size", -EPROTO);
	if (offset & (rackbus_span(size) - 1) ||
	    !rackbus_inside(offset, rackbus_span(size), window))
		return refuse(why, "a BAR is at no place of the window",
			      -EPROTO);
	bar->is_64 = flags & RACKBUS_BAR_64;
	bar->prefetch = flags & RACKBUS_BAR_PREFETCH;
	if (!bar->is_64 && offset + size > 1ull << 32)
		return refuse(why, "a BAR of 32 bits is above 4 GiB", -EPROTO);
	bar->offset = offset;
	bar->size = size;
	return 0;
}

static int check_bars(const struct rackbus_window_header *raw, u64 window,
		      struct rackbus_offer *offer, const char **why)
{
	unsigned int n;
	bool any = false;
	int ret;

	for (n = 0; n < RACKBUS_BARS; n++) {
		ret = check_bar(&raw->bars[n], window, &offer->bars[n], why);
		if (ret)
			return ret;
		any |= offer->bars[n].size != 0;
		if (!offer->bars[n].is_64)
			continue;
		if (n + 1 == RACKBUS_BARS ||
		    le32_to_cpu(raw->bars[n + 1].flags))
			return refuse(why, "a BAR of 64 bits has no room",
				      -EPROTO);
	}
	if (!any)
		return refuse(why, "the function has no BAR", -EPROTO);
	return 0;
}

int rackbus_offer_check(const struct rackbus_window_header *raw, u64 area,
			u64 window, u64 epoch, struct rackbus_offer *offer,
			const char **why)
{
	int ret;

	memset(offer, 0, sizeof(*offer));
	offer->area = area;
	if (area & (RACKBUS_PAGE - 1) ||
	    !rackbus_inside(area, RACKBUS_PAGE, window))
		return refuse(why, "the control area is outside of the window",
			      -EINVAL);
	ret = check_identity(raw, epoch, offer, why);
	if (!ret)
		ret = check_ways(raw, offer, why);
	if (!ret)
		ret = check_pages(raw, window, offer, why);
	if (!ret)
		ret = check_bars(raw, window, offer, why);
	if (!ret && overlaps_itself(offer))
		ret = refuse(why, "parts of the function overlap", -EPROTO);
	return ret;
}

struct rackbus_window_request rackbus_ring_entry(u32 seq, u32 kind, u32 size,
						 u32 offset, u32 value,
						 u64 epoch)
{
	struct rackbus_window_request entry = {
		.seq = cpu_to_le32(seq),
		.what = cpu_to_le32(kind | size << 8 | offset << 16),
		.value = cpu_to_le32(value),
		.epoch = cpu_to_le32((u32)epoch),
	};

	return entry;
}
