/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts without hardware (window.c, config.c) need of the kernel, or in
 * user space, where test/check.c runs them, of test/user.h.
 */
#ifndef _RACKBUS_PURE_H
#define _RACKBUS_PURE_H

#ifdef __KERNEL__
#include <linux/bits.h>
#include <linux/errno.h>
#include <linux/log2.h>
#include <linux/minmax.h>
#include <linux/pci_regs.h>
#include <linux/string.h>
#include <linux/types.h>
#include <asm/byteorder.h>
#else
#include "test/user.h"
#endif

#include "rackbus_window.h"

#endif /* _RACKBUS_PURE_H */
