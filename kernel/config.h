/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The configuration space that this host sees of a borrowed function: made
 * once from the lender's image, answered from here ever after.  No hardware
 * here; the caller serialises, and carries out what a write asks for.
 */
#ifndef _RACKBUS_CONFIG_H
#define _RACKBUS_CONFIG_H

#include "window.h"

/* Bytes of an image that matter; all behind them read as 0. */
#define RACKBUS_SHADOW		RACKBUS_CONFIG_READ

struct rackbus_config {
	u8 value[RACKBUS_SHADOW];
	u8 initial[RACKBUS_SHADOW];	/* after a reset */
	u8 mask[RACKBUS_SHADOW];	/* bits that can be written */
	u16 msix;			/* capabilities; 0: none */
	u16 express;
	u8 sizing;			/* BAR registers that give their size */
	struct rackbus_bar bars[RACKBUS_BARS];
};

/* What a write comes to. */
struct rackbus_change {
	u32 kind;	/* 0: nothing to say to the lender */
	u32 size;	/* of the register to say */
	u32 offset;
	u32 value;
	bool master_on;	/* the driver goes on when the lender has done it */
	/* For rackbus_config_commit(). */
	u32 word;
	u32 after;
	u8 sizing;
};

/*
 * Makes the space of an image of RACKBUS_CONFIG_READ bytes, with that many
 * vectors, which are not more than the offer has.  0, or -EPROTO and why.
 */
int rackbus_config_make(struct rackbus_config *config, const u8 *image,
			const struct rackbus_offer *offer, u32 vectors,
			const char **why);

u32 rackbus_config_read(const struct rackbus_config *config, u32 where,
			u32 size);

/*
 * What writing would change.  The caller says it to the lender when kind is
 * not 0, and then commits; when it cannot, the space stays as it is.
 */
void rackbus_config_write(const struct rackbus_config *config, u32 where,
			  u32 size, u32 value, struct rackbus_change *change);
void rackbus_config_commit(struct rackbus_config *config,
			   const struct rackbus_change *change);

/* The device has been reset. */
void rackbus_config_reset(struct rackbus_config *config);

bool rackbus_config_msix_on(const struct rackbus_config *config);

#endif /* _RACKBUS_CONFIG_H */
