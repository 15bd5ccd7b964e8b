// SPDX-License-Identifier: GPL-2.0
/*
 * Runs window.c and config.c in user space: what a well-behaved lender says,
 * then each thing that is wrong with it, then noise.  "make check" builds it
 * with the sanitizers.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../config.h"

#define WINDOW		(64ull << 20)
#define EPOCH		0x123456789ull
#define MSIX		0x40
#define EXPRESS		0x60
#define HIDDEN		0xb0	/* MSI */
#define VENDOR		0xc0

static int failures;

#define CHECK(what) do {						\
	if (!(what)) {							\
		fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
		failures++;						\
	}								\
} while (0)

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

static struct rackbus_window_header good_header(void)
{
	struct rackbus_window_header raw = {
		.magic = cpu_to_le32(RACKBUS_MAGIC),
		.version = cpu_to_le32(RACKBUS_VERSION),
		.epoch = htole64(EPOCH),
		.state = cpu_to_le32(RACKBUS_WINDOW_READY),
		.heartbeat = cpu_to_le32(77),
		.vectors = cpu_to_le32(65),
		.dma_base = htole64(0x200000000ull),
		.dma_size = htole64(0x20000000ull),
		.msi_base = htole64(0x302e00000ull),
		.mappings = cpu_to_le32(1000),
		.mapped_msi_base = htole64(0xfef00000ull),
		.config_offset = cpu_to_le32(0x1000),
		.ring_offset = cpu_to_le32(0x2000),
		.ring_entries = cpu_to_le32(64),
		.doorbell = cpu_to_le32(3),
		.bars[0] = {
			.offset = htole64(0x100000),
			.size = htole64(0x4000),
			.flags = cpu_to_le32(RACKBUS_BAR_PRESENT |
					     RACKBUS_BAR_64),
		},
		.bars[2] = {
			.offset = htole64(0x200000),
			.size = htole64(0x100),
			.flags = cpu_to_le32(RACKBUS_BAR_PRESENT),
		},
	};

	return raw;
}

static int offer_of(const struct rackbus_window_header *raw,
		    struct rackbus_offer *offer)
{
	const char *why = NULL;
	int ret = rackbus_offer_check(raw, 0, WINDOW, EPOCH, offer, &why);

	CHECK(!ret == !why);
	return ret;
}

static void check_good_header(void)
{
	struct rackbus_window_header raw = good_header();
	struct rackbus_offer offer;

	CHECK(offer_of(&raw, &offer) == 0);
	CHECK(offer.epoch == EPOCH);
	CHECK(offer.heartbeat == 77);
	CHECK(offer.vectors == 65);
	CHECK(!offer.direct);
	CHECK(offer.bars[0].size == 0x4000 && offer.bars[0].is_64);
	CHECK(offer.bars[1].size == 0);
	CHECK(offer.bars[2].offset == 0x200000 && !offer.bars[2].is_64);
}

#define WRONG(field, value, error) do {					\
	struct rackbus_window_header raw = good_header();		\
	struct rackbus_offer offer;					\
									\
	raw.field = value;						\
	CHECK(offer_of(&raw, &offer) == (error));			\
} while (0)

static void check_wrong_headers(void)
{
	WRONG(magic, 0, -ENXIO);
	WRONG(magic, 0xffffffff, -ENXIO);
	WRONG(version, cpu_to_le32(2), -EPROTO);
	WRONG(state, cpu_to_le32(RACKBUS_WINDOW_NONE), -ENXIO);
	WRONG(state, cpu_to_le32(RACKBUS_WINDOW_REVOKED), -ENXIO);
	WRONG(epoch, htole64(EPOCH - 1), -ESTALE);
	WRONG(epoch, htole64(EPOCH | 1ull << 63), -ESTALE);
	WRONG(flags, cpu_to_le32(2), -EPROTO);
	WRONG(vectors, cpu_to_le32(2049), -EPROTO);
	WRONG(dma_base, htole64(0x800), -EPROTO);
	WRONG(dma_base, htole64(0xfffffffff0000000ull), -EPROTO);
	WRONG(dma_size, 0, -ERANGE);
	WRONG(dma_size, htole64(0xfff000), -ERANGE);
	WRONG(dma_size, htole64(~0ull), -EPROTO);
	WRONG(msi_base, htole64(0x302e01000ull), -EPROTO);
	WRONG(mapped_msi_base, htole64(0xfef01000ull), -EPROTO);
	WRONG(config_offset, 0, -EPROTO);
	WRONG(config_offset, cpu_to_le32(0x1004), -EPROTO);
	WRONG(config_offset, cpu_to_le32(0x4000000), -EPROTO);
	WRONG(config_offset, cpu_to_le32(0xfffff000), -EPROTO);
	WRONG(ring_offset, cpu_to_le32(0x1000), -EPROTO);
	WRONG(ring_offset, cpu_to_le32(0x100000), -EPROTO);
	WRONG(ring_entries, 0, -EPROTO);
	WRONG(ring_entries, cpu_to_le32(8), -EPROTO);
	WRONG(ring_entries, cpu_to_le32(63), -EPROTO);
	WRONG(ring_entries, cpu_to_le32(256), -EPROTO);
	WRONG(doorbell, cpu_to_le32(32), -EPROTO);
	WRONG(bars[0].offset, 0, -EPROTO);
	WRONG(bars[0].offset, htole64(0x101000), -EPROTO);
	WRONG(bars[0].offset, htole64(WINDOW), -EPROTO);
	WRONG(bars[0].offset, htole64(~0x3fffull), -EPROTO);
	WRONG(bars[0].size, 0, -EPROTO);
	WRONG(bars[0].size, htole64(8), -EPROTO);
	WRONG(bars[0].size, htole64(0x3000), -EPROTO);
	WRONG(bars[0].size, htole64(1ull << 63), -EPROTO);
	WRONG(bars[0].flags, cpu_to_le32(8 | RACKBUS_BAR_PRESENT), -EPROTO);
	WRONG(bars[1].flags, cpu_to_le32(RACKBUS_BAR_PRESENT), -EPROTO);
	WRONG(bars[2].offset, htole64(0x100000), -EPROTO);
	WRONG(bars[2].offset, htole64(0x200800), -EPROTO);
	WRONG(bars[2].offset, htole64(0x2000), -EPROTO);
	WRONG(bars[5].flags,
	      cpu_to_le32(RACKBUS_BAR_PRESENT | RACKBUS_BAR_64), -EPROTO);
}

static void check_places(void)
{
	struct rackbus_window_header raw = good_header();
	struct rackbus_offer one, other;
	const char *why = NULL;

	CHECK(rackbus_offer_check(&raw, 0x800, WINDOW, EPOCH, &one, &why) ==
	      -EINVAL);
	CHECK(rackbus_offer_check(&raw, WINDOW, WINDOW, EPOCH, &one, &why) ==
	      -EINVAL);
	CHECK(rackbus_offer_check(&raw, ~0xfffull, WINDOW, EPOCH, &one, &why) ==
	      -EINVAL);
	/* No room for what comes behind the header. */
	CHECK(rackbus_offer_check(&raw, WINDOW - 0x2000, WINDOW, EPOCH, &one,
				  &why) == -EPROTO);
	CHECK(offer_of(&raw, &one) == 0);
	raw.bars[0].offset = htole64(0x300000);
	raw.bars[2].offset = htole64(0x400000);
	CHECK(rackbus_offer_check(&raw, 0x10000, WINDOW, EPOCH, &other, &why) ==
	      0);
	CHECK(!rackbus_offers_overlap(&one, &other));
	CHECK(rackbus_offers_overlap(&one, &one));
	other.bars[2].offset = 0x103000;
	CHECK(rackbus_offers_overlap(&one, &other));
	other.bars[2].offset = 0x104000;
	CHECK(!rackbus_offers_overlap(&one, &other));
	other.area = 0x1000;
	CHECK(rackbus_offers_overlap(&one, &other));
}

static void check_ring(void)
{
	struct rackbus_window_request entry;

	CHECK(rackbus_ring_room(0, 0, 64));
	CHECK(rackbus_ring_room(63, 0, 64));
	CHECK(!rackbus_ring_room(64, 0, 64));
	CHECK(rackbus_ring_room(5, 0xfffffff0, 64));
	CHECK(!rackbus_ring_room(5, 6, 64));
	CHECK(!rackbus_ring_room(5, 0xffffffff - 64, 64));
	CHECK(rackbus_ring_passed(5, 5));
	CHECK(!rackbus_ring_passed(4, 5));
	CHECK(rackbus_ring_passed(1, 0xfffffffe));
	CHECK(!rackbus_ring_passed(0xffffffff, 3));
	CHECK(rackbus_ring_idle(0, 0, 64) == 0);
	CHECK(rackbus_ring_idle(0xffffffff, 0xffffffff, 64) == 0);
	CHECK(rackbus_ring_idle(7, 6, 64) == -EAGAIN);
	CHECK(rackbus_ring_idle(64, 0, 64) == -EAGAIN);
	CHECK(rackbus_ring_idle(3, 0xfffffffe, 64) == -EAGAIN);
	CHECK(rackbus_ring_idle(65, 0, 64) == -EPROTO);
	CHECK(rackbus_ring_idle(6, 7, 64) == -EPROTO);
	entry = rackbus_ring_entry(9, RACKBUS_REQUEST_WRITE, 2, 0x42, 0x8007,
				   EPOCH);
	CHECK(le32_to_cpu(entry.seq) == 9);
	CHECK(le32_to_cpu(entry.what) == (1 | 2 << 8 | 0x42 << 16));
	CHECK(le32_to_cpu(entry.value) == 0x8007);
	CHECK(le32_to_cpu(entry.epoch) == (u32)EPOCH);
	CHECK(!rackbus_ring_released(10, &entry));
	entry = rackbus_ring_entry(9, RACKBUS_REQUEST_RELEASE, 0, 0, 0, EPOCH);
	CHECK(rackbus_ring_released(10, &entry));
	CHECK(!rackbus_ring_released(11, &entry));
	CHECK(rackbus_ring_released(0, &entry));
	CHECK(rackbus_result(0) == 0);
	CHECK(rackbus_result(EEXIST) == -EEXIST);
	CHECK(rackbus_result(4095) == -4095);
	CHECK(rackbus_result(EAGAIN) == -EPROTO);
	CHECK(rackbus_result(4096) == -EPROTO);
	CHECK(rackbus_result(~0u) == -EPROTO);
	CHECK(rackbus_inside(0, 16, 16));
	CHECK(!rackbus_inside(1, 16, 16));
	CHECK(!rackbus_inside(~0ull, 2, 16));
	CHECK(!rackbus_inside(0, ~0ull, 16));
}

static void good_image(u8 *image)
{
	memset(image, 0, RACKBUS_CONFIG_READ);
	put32(image, PCI_VENDOR_ID, 0x00101b36);
	put16(image, PCI_COMMAND, 0x0406);
	put16(image, PCI_STATUS, 0xffff);
	put32(image, PCI_CLASS_REVISION, 0x01080202);
	image[PCI_HEADER_TYPE] = 0x80;
	memset(&image[PCI_BASE_ADDRESS_0], 0xff, 24);
	put32(image, PCI_ROM_ADDRESS, 0xfffff801);
	image[PCI_CAPABILITY_LIST] = HIDDEN;
	image[HIDDEN] = PCI_CAP_ID_MSI;
	image[HIDDEN + 1] = MSIX;
	image[MSIX] = PCI_CAP_ID_MSIX;
	image[MSIX + 1] = EXPRESS;
	put16(image, MSIX + PCI_MSIX_FLAGS, 0xc000 | 64);
	put32(image, MSIX + PCI_MSIX_TABLE, 0x2000);
	put32(image, MSIX + PCI_MSIX_PBA, 0x3000);
	image[EXPRESS] = PCI_CAP_ID_EXP;
	image[EXPRESS + 1] = VENDOR;
	put16(image, EXPRESS + PCI_EXP_FLAGS, 0x0002);
	put32(image, EXPRESS + PCI_EXP_DEVCAP, PCI_EXP_DEVCAP_FLR | 5);
	put16(image, EXPRESS + PCI_EXP_DEVCTL, 0x202f);
	put32(image, EXPRESS + PCI_EXP_LNKCAP, 0xffffffff);
	image[VENDOR] = PCI_CAP_ID_VNDR;
	image[VENDOR + 2] = 8;
	put32(image, VENDOR + 4, 0xcafe);
	put16(image, 0x100, PCI_EXT_CAP_ID_DSN);
	put16(image, 0x102, 0x1401);
	put32(image, 0x104, 0x11223344);
}

static struct rackbus_offer good_offer(void)
{
	struct rackbus_window_header raw = good_header();
	struct rackbus_offer offer;

	CHECK(offer_of(&raw, &offer) == 0);
	return offer;
}

static int make(struct rackbus_config *config, const u8 *image)
{
	struct rackbus_offer offer = good_offer();
	const char *why = NULL;
	int ret = rackbus_config_make(config, image, &offer, 8, &why);

	CHECK(!ret == !why);
	return ret;
}

static u32 get(struct rackbus_config *config, u32 where, u32 size)
{
	return rackbus_config_read(config, where, size);
}

static struct rackbus_change set(struct rackbus_config *config, u32 where,
				 u32 size, u32 value)
{
	struct rackbus_change change;

	rackbus_config_write(config, where, size, value, &change);
	rackbus_config_commit(config, &change);
	return change;
}

static void check_shown(void)
{
	static struct rackbus_config config;
	u8 image[RACKBUS_CONFIG_READ];

	good_image(image);
	CHECK(make(&config, image) == 0);
	CHECK(get(&config, 0, 4) == 0x00101b36);
	CHECK(get(&config, PCI_COMMAND, 4) == PCI_STATUS_CAP_LIST << 16);
	CHECK(get(&config, PCI_HEADER_TYPE, 1) == 0);
	CHECK(get(&config, PCI_ROM_ADDRESS, 4) == 0);
	CHECK(get(&config, PCI_BASE_ADDRESS_0, 4) == 0x100004);
	CHECK(get(&config, PCI_BASE_ADDRESS_1, 4) == 0);
	CHECK(get(&config, PCI_BASE_ADDRESS_2, 4) == 0x200000);
	/* MSI is passed over, the others are chained. */
	CHECK(get(&config, PCI_CAPABILITY_LIST, 1) == MSIX);
	CHECK(get(&config, MSIX, 4) == (PCI_CAP_ID_MSIX | EXPRESS << 8 | 7 << 16));
	CHECK(get(&config, EXPRESS + 1, 1) == VENDOR);
	CHECK(get(&config, VENDOR + 1, 1) == 0);
	CHECK(get(&config, VENDOR + 4, 4) == 0xcafe);
	CHECK(get(&config, EXPRESS + PCI_EXP_FLAGS, 2) == 0x92);
	CHECK(get(&config, EXPRESS + PCI_EXP_DEVCAP, 4) ==
	      (PCI_EXP_DEVCAP_FLR | PCI_EXP_DEVCAP_RBER | 1));
	CHECK(get(&config, EXPRESS + PCI_EXP_DEVCTL, 2) == 0x2020);
	CHECK(get(&config, EXPRESS + PCI_EXP_LNKCAP, 4) == 0);
	CHECK(get(&config, 0x100, 4) == 0x00010003);
	CHECK(get(&config, 0x104, 4) == 0x11223344);
	CHECK(get(&config, 0x10c, 4) == 0);
	CHECK(get(&config, 0xffc, 4) == 0);
	CHECK(get(&config, 0x1000, 4) == 0xffffffff);
	CHECK(get(&config, 2, 4) == 0xffffffff);
	CHECK(get(&config, 0, 3) == 0xffffffff);
	CHECK(get(&config, 0xffffffff, 1) == 0xffffffff);
}

static void check_writes(void)
{
	static struct rackbus_config config;
	u8 image[RACKBUS_CONFIG_READ];
	struct rackbus_change change;

	good_image(image);
	CHECK(make(&config, image) == 0);
	change = set(&config, PCI_COMMAND, 2, 0xffff);
	CHECK(change.kind == RACKBUS_REQUEST_WRITE && change.size == 2 &&
	      change.offset == PCI_COMMAND && change.value == 0x0546);
	CHECK(change.master_on);
	CHECK(set(&config, PCI_COMMAND, 4, 0xffff0546).kind == 0);
	change = set(&config, PCI_COMMAND, 1, 2);
	CHECK(change.kind && !change.master_on && change.value == 0x0502);
	CHECK(set(&config, PCI_COMMAND + 1, 1, 4).kind == 0);
	CHECK(get(&config, PCI_COMMAND, 2) == 0x0402);
	change = set(&config, MSIX + PCI_MSIX_FLAGS, 2, 0xffff);
	CHECK(change.kind == RACKBUS_REQUEST_WRITE &&
	      change.offset == MSIX + PCI_MSIX_FLAGS && change.value == 0xc007);
	CHECK(rackbus_config_msix_on(&config));
	change = set(&config, EXPRESS + PCI_EXP_DEVCTL, 2, 0x5010);
	CHECK(change.kind == RACKBUS_REQUEST_WRITE && change.value == 0x5030);
	/* What is not writable stays. */
	CHECK(set(&config, PCI_VENDOR_ID, 4, 0).kind == 0);
	CHECK(set(&config, VENDOR + 4, 4, 0).kind == 0);
	CHECK(set(&config, 0x104, 4, 0).kind == 0);
	CHECK(set(&config, 0xffc, 4, 5).kind == 0);
	CHECK(set(&config, 0x1000, 4, 5).kind == 0);
	CHECK(set(&config, 3, 2, 5).kind == 0);
	CHECK(get(&config, PCI_VENDOR_ID, 4) == 0x00101b36);
	CHECK(get(&config, 0x104, 4) == 0x11223344);
	CHECK(get(&config, VENDOR + 4, 4) == 0xcafe);
	set(&config, PCI_INTERRUPT_LINE, 1, 0x0b);
	CHECK(get(&config, PCI_INTERRUPT_LINE, 2) == 0x0b);
	rackbus_config_reset(&config);
	CHECK(!rackbus_config_msix_on(&config));
	CHECK(get(&config, PCI_COMMAND, 2) == 0);
}

static void check_bars_and_reset(void)
{
	static struct rackbus_config config;
	u8 image[RACKBUS_CONFIG_READ];
	struct rackbus_change change;

	good_image(image);
	CHECK(make(&config, image) == 0);
	set(&config, PCI_BASE_ADDRESS_0, 4, 0xdead0000);
	CHECK(get(&config, PCI_BASE_ADDRESS_0, 4) == 0x100004);
	set(&config, PCI_BASE_ADDRESS_0, 4, 0xffffffff);
	set(&config, PCI_BASE_ADDRESS_1, 4, 0xffffffff);
	set(&config, PCI_BASE_ADDRESS_2, 4, 0xffffffff);
	set(&config, PCI_BASE_ADDRESS_3, 4, 0xffffffff);
	CHECK(get(&config, PCI_BASE_ADDRESS_0, 4) == 0xffffc004);
	CHECK(get(&config, PCI_BASE_ADDRESS_1, 4) == 0xffffffff);
	CHECK(get(&config, PCI_BASE_ADDRESS_2, 4) == 0xffffff00);
	CHECK(get(&config, PCI_BASE_ADDRESS_3, 4) == 0);
	set(&config, PCI_BASE_ADDRESS_0, 4, 0x100004);
	set(&config, PCI_BASE_ADDRESS_1, 4, 0);
	CHECK(get(&config, PCI_BASE_ADDRESS_0, 4) == 0x100004);
	CHECK(get(&config, PCI_BASE_ADDRESS_1, 4) == 0);
	/* A reset is asked for by one bit, and that bit alone goes nowhere. */
	set(&config, PCI_COMMAND, 2, 6);
	change = set(&config, EXPRESS + PCI_EXP_DEVCTL, 2, 0xa020);
	CHECK(change.kind == RACKBUS_REQUEST_RESET && change.size == 0);
	CHECK(!(get(&config, EXPRESS + PCI_EXP_DEVCTL, 2) & 0x8000));
	put32(image, EXPRESS + PCI_EXP_DEVCAP, 0);
	CHECK(make(&config, image) == 0);
	CHECK(set(&config, EXPRESS + PCI_EXP_DEVCTL, 2, 0xa020).kind == 0);
}

/* An image with one thing changed is refused. */
static void wrong(u32 at, u32 size, u32 value)
{
	static struct rackbus_config config;
	u8 image[RACKBUS_CONFIG_READ];

	good_image(image);
	while (size--) {
		image[at++] = value & 0xff;
		value >>= 8;
	}
	CHECK(make(&config, image) == -EPROTO);
}

static void check_wrong_images(void)
{
	wrong(PCI_VENDOR_ID, 2, 0xffff);
	wrong(PCI_VENDOR_ID, 2, 0);
	wrong(PCI_HEADER_TYPE, 1, PCI_HEADER_TYPE_BRIDGE);
	wrong(PCI_CAPABILITY_LIST, 1, 0);	/* vectors without MSI-X */
	wrong(VENDOR + 1, 1, HIDDEN);		/* a circle */
	wrong(VENDOR + 1, 1, VENDOR);
	wrong(VENDOR + 2, 1, 0xff);		/* over the end */
	wrong(EXPRESS + 1, 1, EXPRESS);
	wrong(MSIX + PCI_MSIX_FLAGS, 2, 63);
	wrong(MSIX + PCI_MSIX_TABLE, 4, 0x2001);	/* no such BAR */
	wrong(MSIX + PCI_MSIX_TABLE, 4, 0x2007);
	wrong(MSIX + PCI_MSIX_TABLE, 4, 0x4000);
	wrong(MSIX + PCI_MSIX_TABLE, 4, 0xfffffff8);
	wrong(MSIX + PCI_MSIX_PBA, 4, 0x3ff8);
	wrong(VENDOR, 1, PCI_CAP_ID_EXP);	/* twice */
}

static u32 seed = 1;

static u32 noise(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 17;
	seed ^= seed << 5;
	return seed;
}

/* Whatever a lender says, the sanitizers find nothing and BARs hold still. */
static void check_noise(void)
{
	static struct rackbus_config config;
	struct rackbus_offer offer = good_offer();
	u8 image[RACKBUS_CONFIG_READ];
	struct rackbus_window_header raw;
	unsigned int made = 0, n, i;
	const char *why = NULL;

	for (n = 0; n < 200000; n++) {
		raw = good_header();
		for (i = 0; i < 3; i++)
			((u8 *)&raw)[noise() % sizeof(raw)] = noise();
		rackbus_offer_check(&raw, (u64)(noise() % 0x5000) << 12, WINDOW,
				    EPOCH, &offer, &why);
		good_image(image);
		for (i = 0; i < 3; i++)
			image[noise() % sizeof(image)] = noise();
		offer = good_offer();
		if (rackbus_config_make(&config, image, &offer, 8, &why))
			continue;
		made++;
		for (i = 0; i < 20; i++)
			set(&config, noise() % 0x120, 1u << noise() % 3, noise());
		set(&config, PCI_BASE_ADDRESS_0, 4, 0);
		CHECK(get(&config, PCI_BASE_ADDRESS_0, 4) == 0x100004);
	}
	CHECK(made > 1000);
}

int main(void)
{
	check_good_header();
	check_wrong_headers();
	check_places();
	check_ring();
	check_shown();
	check_writes();
	check_bars_and_reset();
	check_wrong_images();
	check_noise();
	if (failures) {
		fprintf(stderr, "check: %d failed\n", failures);
		return 1;
	}
	puts("check: ok");
	return 0;
}
