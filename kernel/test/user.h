/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What window.c and config.c take of the kernel, for user space.
 */
#ifndef _RACKBUS_TEST_USER_H
#define _RACKBUS_TEST_USER_H

#include <endian.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <linux/pci_regs.h>
#include <linux/types.h>

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;

#define le32_to_cpu(x)		le32toh(x)
#define le64_to_cpu(x)		le64toh(x)
#define cpu_to_le32(x)		htole32(x)
#define max_t(type, a, b)	max_##type((a), (b))

static inline bool is_power_of_2(u64 n)
{
	return n && !(n & (n - 1));
}

static inline u64 max_u64(u64 a, u64 b)
{
	return a > b ? a : b;
}

static inline u32 max_u32(u32 a, u32 b)
{
	return a > b ? a : b;
}

#endif /* _RACKBUS_TEST_USER_H */
