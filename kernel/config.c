// SPDX-License-Identifier: GPL-2.0
/*
 * A borrowed function's configuration space.  The lender's image is hostile:
 * what is shown of it is what is known to be harmless and of use here.
 */
#include "config.h"

#define COMMAND_MASK	(PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER | \
			 PCI_COMMAND_PARITY | PCI_COMMAND_SERR | \
			 PCI_COMMAND_INTX_DISABLE)
/* Of these the lender hears. */
#define COMMAND_SAID	(PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER | \
			 PCI_COMMAND_INTX_DISABLE)
#define MSIX_MASK	(PCI_MSIX_FLAGS_ENABLE | PCI_MSIX_FLAGS_MASKALL)
#define EXPRESS_MASK	(PCI_EXP_DEVCTL_RELAX_EN | PCI_EXP_DEVCTL_NOSNOOP_EN | \
			 PCI_EXP_DEVCTL_READRQ)

#define MSIX_SIZE	12
#define EXPRESS_SIZE	12	/* without what belongs to links and ports */
#define EXPRESS_1_SIZE	0x14	/* as it is laid out, by its version */
#define EXPRESS_2_SIZE	0x3c
#define STANDARD_SIZE	0x100
#define SERIAL		0x100
#define SERIAL_SIZE	12

static int refuse(const char **why, const char *text)
{
	*why = text;
	return -EPROTO;
}

static u16 get16(const u8 *bytes, u32 at)
{
	return bytes[at] | (u16)(bytes[at + 1] << 8);
}

static u32 get32(const u8 *bytes, u32 at)
{
	return get16(bytes, at) | (u32)get16(bytes, at + 2) << 16;
}

static void put16(u8 *bytes, u32 at, u16 value)
{
	bytes[at] = value & 0xff;
	bytes[at + 1] = value >> 8;
}

static void put32(u8 *bytes, u32 at, u32 value)
{
	put16(bytes, at, value & 0xffff);
	put16(bytes, at + 2, value >> 16);
}

/* The header: identity from the image, all else ours. */
static int make_header(struct rackbus_config *config,
		       const struct rackbus_offer *offer, const char **why)
{
	u8 *value = config->value;
	unsigned int n;

	if (get16(value, PCI_VENDOR_ID) == 0xffff ||
	    get16(value, PCI_VENDOR_ID) == 0)
		return refuse(why, "the function has no vendor");
	if ((value[PCI_HEADER_TYPE] & 0x7f) != PCI_HEADER_TYPE_NORMAL)
		return refuse(why, "the function is a bridge");
	value[PCI_HEADER_TYPE] = PCI_HEADER_TYPE_NORMAL;
	put16(value, PCI_COMMAND, 0);
	put16(value, PCI_STATUS, 0);
	put16(config->mask, PCI_COMMAND, COMMAND_MASK);
	value[PCI_CACHE_LINE_SIZE] = 0;
	value[PCI_LATENCY_TIMER] = 0;
	value[PCI_BIST] = 0;
	config->mask[PCI_CACHE_LINE_SIZE] = 0xff;
	memset(&value[PCI_BASE_ADDRESS_0], 0, 4 * RACKBUS_BARS);
	put32(value, PCI_CARDBUS_CIS, 0);
	put32(value, PCI_ROM_ADDRESS, 0);
	value[PCI_CAPABILITY_LIST] = 0;
	memset(&value[PCI_CAPABILITY_LIST + 1], 0, 7);
	memset(&value[PCI_INTERRUPT_LINE], 0, 4);
	config->mask[PCI_INTERRUPT_LINE] = 0xff;
	for (n = 0; n < RACKBUS_BARS; n++) {
		const struct rackbus_bar *bar = &offer->bars[n];
		u32 at = PCI_BASE_ADDRESS_0 + 4 * n;

		config->bars[n] = *bar;
		if (!bar->size)
			continue;
		put32(value, at, (u32)bar->offset |
		      (bar->is_64 ? PCI_BASE_ADDRESS_MEM_TYPE_64 : 0) |
		      (bar->prefetch ? PCI_BASE_ADDRESS_MEM_PREFETCH : 0));
		if (bar->is_64)
			put32(value, at + 4, (u32)(bar->offset >> 32));
	}
	return 0;
}

/* Whether a table of MSI-X is in a BAR that is there. */
static bool table_inside(u32 place, u64 size, const struct rackbus_offer *offer)
{
	u32 bir = place & PCI_MSIX_TABLE_BIR;

	return bir < RACKBUS_BARS &&
	       rackbus_inside(place & PCI_MSIX_TABLE_OFFSET, size,
			      offer->bars[bir].size);
}

static int make_msix(struct rackbus_config *config, u32 at,
		     const struct rackbus_offer *offer, u32 vectors,
		     const char **why)
{
	u8 *value = config->value;
	u32 size = (get16(value, at + PCI_MSIX_FLAGS) & PCI_MSIX_FLAGS_QSIZE) + 1;

	if (config->msix)
		return refuse(why, "MSI-X is there twice");
	if (size != offer->vectors)
		return refuse(why, "MSI-X has another number of vectors");
	if (!table_inside(get32(value, at + PCI_MSIX_TABLE), 16ull * size,
			  offer) ||
	    !table_inside(get32(value, at + PCI_MSIX_PBA),
			  8ull * ((size + 63) / 64), offer))
		return refuse(why, "a table of MSI-X is outside of its BAR");
	put16(value, at + PCI_MSIX_FLAGS, vectors - 1);
	put16(config->mask, at + PCI_MSIX_FLAGS, MSIX_MASK);
	config->msix = at;
	return 0;
}

/*
 * An integrated endpoint has no link to train, to save power on or to report
 * errors of.  Its payload size is the lender's affair: the host is told that
 * the device can do no more than what is set.
 */
static int make_express(struct rackbus_config *config, u32 at, u32 length,
			const char **why)
{
	u8 *value = config->value;
	u16 control = get16(value, at + PCI_EXP_DEVCTL);
	u32 can = get32(value, at + PCI_EXP_DEVCAP) & PCI_EXP_DEVCAP_FLR;

	if (config->express)
		return refuse(why, "PCI Express is there twice");
	put16(value, at + PCI_EXP_FLAGS,
	      (get16(value, at + PCI_EXP_FLAGS) & PCI_EXP_FLAGS_VERS) |
	      PCI_EXP_TYPE_RC_END << 4);
	can |= PCI_EXP_DEVCAP_RBER;
	can |= (control & PCI_EXP_DEVCTL_PAYLOAD) >> 5;
	control &= PCI_EXP_DEVCTL_PAYLOAD | EXPRESS_MASK;
	put32(value, at + PCI_EXP_DEVCAP, can);
	put16(value, at + PCI_EXP_DEVCTL, control);
	put16(value, at + PCI_EXP_DEVSTA, 0);
	put16(config->mask, at + PCI_EXP_DEVCTL, EXPRESS_MASK);
	memset(&value[at + EXPRESS_SIZE], 0, length - EXPRESS_SIZE);
	config->express = at;
	return 0;
}

/* How many bytes a capability has that is shown; 0: it is not shown. */
static u32 shown(const u8 *image, u32 at)
{
	u32 version;

	switch (image[at]) {
	case PCI_CAP_ID_MSIX:
		return MSIX_SIZE;
	case PCI_CAP_ID_VNDR:
		return max_t(u32, image[at + 2], 4);
	case PCI_CAP_ID_EXP:
		version = image[at + PCI_EXP_FLAGS] & PCI_EXP_FLAGS_VERS;
		return version > 1 ? EXPRESS_2_SIZE : EXPRESS_1_SIZE;
	}
	return 0;
}

/* Chains up what is shown, in the image's order; each is where it was. */
static int make_capabilities(struct rackbus_config *config, const u8 *image,
			     const struct rackbus_offer *offer, u32 vectors,
			     const char **why)
{
	u32 at = image[PCI_CAPABILITY_LIST] & ~3u;
	u32 last = PCI_CAPABILITY_LIST;
	u32 end = STANDARD_SIZE;
	u8 taken[STANDARD_SIZE / 4] = { 0 };
	unsigned int n, word;
	u32 length;
	int ret = 0;

	for (n = 0; at >= PCI_STD_HEADER_SIZEOF; n++, at = image[at + 1] & ~3u) {
		if (n == STANDARD_SIZE / 4)
			return refuse(why, "capabilities run in a circle");
		length = shown(image, at);
		if (!length || (image[at] == PCI_CAP_ID_MSIX && !vectors))
			continue;
		if (length > end - at)
			return refuse(why, "a capability ends nowhere");
		for (word = at / 4; word < (at + length + 3) / 4; word++)
			if (taken[word]++)
				return refuse(why, "capabilities overlap");
		if (image[at] == PCI_CAP_ID_MSIX)
			ret = make_msix(config, at, offer, vectors, why);
		else if (image[at] == PCI_CAP_ID_EXP)
			ret = make_express(config, at, length, why);
		if (ret)
			return ret;
		config->value[last] = at;
		config->value[at + 1] = 0;
		last = at + 1;
	}
	if (vectors && !config->msix)
		return refuse(why, "the function has vectors, and no MSI-X");
	if (last != PCI_CAPABILITY_LIST)
		put16(config->value, PCI_STATUS, PCI_STATUS_CAP_LIST);
	return 0;
}

int rackbus_config_make(struct rackbus_config *config, const u8 *image,
			const struct rackbus_offer *offer, u32 vectors,
			const char **why)
{
	u32 serial = PCI_EXT_CAP_ID_DSN | 1u << 16;
	int ret;

	memset(config, 0, sizeof(*config));
	memcpy(config->value, image, RACKBUS_SHADOW);
	ret = make_header(config, offer, why);
	if (!ret)
		ret = make_capabilities(config, image, offer, vectors, why);
	if (ret)
		return ret;
	if (get16(image, SERIAL) == PCI_EXT_CAP_ID_DSN && config->express)
		put32(config->value, SERIAL, serial);
	else
		memset(&config->value[SERIAL], 0, SERIAL_SIZE);
	memcpy(config->initial, config->value, RACKBUS_SHADOW);
	return 0;
}

/* A BAR register gives its address, or its size after all ones were written. */
static u32 bar_register(const struct rackbus_config *config, unsigned int n,
			bool sizing)
{
	u32 plain = get32(config->initial, PCI_BASE_ADDRESS_0 + 4 * n);
	u64 mask;

	if (!sizing)
		return plain;
	if (config->bars[n].size) {
		mask = ~(config->bars[n].size - 1);
		return (u32)mask | (plain & ~PCI_BASE_ADDRESS_MEM_MASK);
	}
	if (n && config->bars[n - 1].is_64)
		return (u32)(~(config->bars[n - 1].size - 1) >> 32);
	return 0;
}

static bool valid(u32 where, u32 size)
{
	return (size == 1 || size == 2 || size == 4) && !(where & (size - 1)) &&
	       where < RACKBUS_CONFIG_SIZE;
}

u32 rackbus_config_read(const struct rackbus_config *config, u32 where,
			u32 size)
{
	u32 word;

	if (!valid(where, size))
		return ~0u;
	if (where >= RACKBUS_SHADOW)
		return 0;
	word = get32(config->value, where & ~3u) >> 8 * (where & 3);
	return size == 4 ? word : word & ((1u << 8 * size) - 1);
}

/* Whether the device is asked to reset itself. The bit reads as 0. */
static bool asks_reset(const struct rackbus_config *config, u32 word,
		       u32 written)
{
	return config->express && word == (u32)config->express + PCI_EXP_DEVCTL &&
	       written & PCI_EXP_DEVCTL_BCR_FLR &&
	       get32(config->value, config->express + PCI_EXP_DEVCAP) &
	       PCI_EXP_DEVCAP_FLR;
}

/* The register of this word that the lender hears of, if it changes. */
static void say(const struct rackbus_config *config, u32 before,
		struct rackbus_change *change)
{
	u32 shift = 0;
	u32 bits;

	if (change->word == PCI_COMMAND) {
		bits = COMMAND_SAID;
		change->master_on = change->after & ~before & PCI_COMMAND_MASTER;
	} else if (config->msix && change->word == config->msix) {
		shift = 16;
		bits = MSIX_MASK;
	} else if (config->express &&
		   change->word == (u32)config->express + PCI_EXP_DEVCTL) {
		bits = EXPRESS_MASK;
	} else {
		return;
	}
	if (!((before ^ change->after) >> shift & bits))
		return;
	change->kind = RACKBUS_REQUEST_WRITE;
	change->size = 2;
	change->offset = change->word + shift / 8;
	change->value = change->after >> shift & 0xffff;
}

void rackbus_config_write(const struct rackbus_config *config, u32 where,
			  u32 size, u32 value, struct rackbus_change *change)
{
	u32 word = where & ~3u;
	u32 shift = 8 * (where & 3);
	u32 lanes, before, mask;
	unsigned int bar;

	memset(change, 0, sizeof(*change));
	change->sizing = config->sizing;
	if (!valid(where, size) || where >= RACKBUS_SHADOW) {
		change->after = get32(config->value, 0);
		return;
	}
	lanes = (size == 4 ? ~0u : (1u << 8 * size) - 1) << shift;
	before = get32(config->value, word);
	change->word = word;
	bar = (word - PCI_BASE_ADDRESS_0) / 4;
	if (word >= PCI_BASE_ADDRESS_0 && bar < RACKBUS_BARS) {
		change->sizing &= ~(1u << bar);
		if (size == 4 && value == ~0u)
			change->sizing |= 1u << bar;
		change->after = bar_register(config, bar,
					     change->sizing >> bar & 1);
		return;
	}
	mask = get32(config->mask, word) & lanes;
	change->after = (before & ~mask) | (value << shift & mask);
	if (asks_reset(config, word, value << shift & lanes))
		change->kind = RACKBUS_REQUEST_RESET;
	else
		say(config, before, change);
}

void rackbus_config_commit(struct rackbus_config *config,
			   const struct rackbus_change *change)
{
	config->sizing = change->sizing;
	put32(config->value, change->word, change->after);
}

void rackbus_config_reset(struct rackbus_config *config)
{
	config->sizing = 0;
	memcpy(config->value, config->initial, RACKBUS_SHADOW);
}

bool rackbus_config_msix_on(const struct rackbus_config *config)
{
	return config->msix &&
	       get16(config->value, config->msix + PCI_MSIX_FLAGS) &
	       PCI_MSIX_FLAGS_ENABLE;
}
