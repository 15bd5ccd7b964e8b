/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Where kernels from 6.1 to 7.3 differ; nothing else asks for a version.
 */
#ifndef _RACKBUS_COMPAT_H
#define _RACKBUS_COMPAT_H

#include <linux/blkdev.h>
#include <linux/dma-map-ops.h>
#include <linux/file.h>
#include <linux/irq.h>
#include <linux/msi.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/version.h>

/*
 * Without operations of its own a device would be given addresses that mean
 * the lender's memory: set_dma_ops() is there then, and does nothing.
 */
#if !defined(CONFIG_ARCH_HAS_DMA_OPS) && !defined(CONFIG_DMA_OPS)
#error "devices cannot have DMA operations here (CONFIG_XEN or CONFIG_GART_IOMMU)"
#endif

/* A function's interrupts are a domain of PCI MSIs, or the parent of such. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 16, 0)
#define RACKBUS_MSI_PARENT 1
#else
#define RACKBUS_MSI_PARENT 0
#endif

/*
 * An interrupt is moved when that is asked for.  Otherwise the kernel waits for
 * the next one, and for a chip of the processor's to move it then.
 */
static inline void rackbus_move_at_once(unsigned int irq)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 14, 0)
	irq_set_status_flags(irq, IRQ_MOVE_PCNTXT);
#endif
}

/* DMA is mapped by physical address instead of by page. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 18, 0)
#define RACKBUS_MAP_PHYS 1
#else
#define RACKBUS_MAP_PHYS 0
#endif

/*
 * A device is asked for by the IOMMU that it says it has, so that this module's
 * can be beside others.  Before, one driver had all of a bus, and could not be
 * unloaded: the bus kept its operations.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
#define RACKBUS_IOMMU 1
#else
#define RACKBUS_IOMMU 0
#endif

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 19, 0)
#define RACKBUS_ATTACH(name) \
	int name(struct iommu_domain *domain, struct device *dev, \
		 struct iommu_domain *old)
#else
#define RACKBUS_ATTACH(name) \
	int name(struct iommu_domain *domain, struct device *dev)
#endif

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
#define RACKBUS_ALLOC_PAGES alloc_pages_op
#else
#define RACKBUS_ALLOC_PAGES alloc_pages
#endif

/* A block device that is open for reading, and that nobody else has exclusively. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0)
typedef struct file *rackbus_claim;
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
typedef struct bdev_handle *rackbus_claim;
#else
typedef struct block_device *rackbus_claim;
#endif

/* Or an ERR_PTR(). */
static inline rackbus_claim rackbus_claim_get(dev_t number, void *holder)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0)
	return bdev_file_open_by_dev(number, BLK_OPEN_READ, holder, NULL);
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
	return bdev_open_by_dev(number, BLK_OPEN_READ, holder, NULL);
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
	return blkdev_get_by_dev(number, BLK_OPEN_READ, holder, NULL);
#else
	return blkdev_get_by_dev(number, FMODE_READ | FMODE_EXCL, holder);
#endif
}

static inline void rackbus_claim_put(rackbus_claim claim, void *holder)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0)
	/* bdev_fput() leaves it open until this task is back in user mode. */
	__fput_sync(claim);
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
	bdev_release(claim);
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
	blkdev_put(claim, holder);
#else
	blkdev_put(claim, FMODE_READ | FMODE_EXCL);
#endif
}

/*
 * IOMMU drivers compare the low 16 bits of a PCI domain: those of ours must be
 * no machine's (whose domains ACPI numbers from 0), or a machine's IOMMU has
 * the device.  QEMU takes a device of a VM by a domain of 16 bits, no more.
 * VT-d of Linux 6.1 takes the interrupts of whatever is in such a domain: on
 * kernels where no VM gets a function anyway, ours have more bits.
 */
#if RACKBUS_IOMMU
#define RACKBUS_FIRST_DOMAIN 0xff00
#define RACKBUS_LAST_DOMAIN 0xffff
#else
#define RACKBUS_FIRST_DOMAIN 0x1ff00
#define RACKBUS_LAST_DOMAIN 0x1ffff
#endif

/* With pci_lock_rescan_remove() held.  Negative if there is none. */
static inline int rackbus_domain_get(void)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 18, 0)
	return pci_bus_find_emul_domain_nr(0, RACKBUS_FIRST_DOMAIN,
					   RACKBUS_LAST_DOMAIN);
#else
	int domain = RACKBUS_FIRST_DOMAIN;

	while (pci_find_bus(domain, 0))
		if (++domain > RACKBUS_LAST_DOMAIN)
			return -ENOSPC;
	return domain;
#endif
}

static inline void rackbus_domain_put(int domain)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 18, 0)
	pci_bus_release_emul_domain_nr(domain);
#endif
}

/*
 * An override that no driver has keeps them all off a device.  One that user
 * space has set stays, and is obeyed.  Where there is neither kind of override
 * (see Kbuild), or no memory, the device gets its driver when it is added.
 *
 * What is in held is freed with the function, as a driver that looks for its
 * devices may be reading it without a lock.
 */
#define RACKBUS_NO_DRIVER "rackbus-none"

static inline void rackbus_hold_off(struct pci_dev *pdev, const char **held)
{
#if defined(RACKBUS_PCI_OVERRIDE)
	const char *none = kstrdup(RACKBUS_NO_DRIVER, GFP_KERNEL);

	device_lock(&pdev->dev);
	if (!pdev->driver_override) {
		pdev->driver_override = none;
		*held = none;
		none = NULL;
	}
	device_unlock(&pdev->dev);
	kfree(none);
#elif defined(RACKBUS_DEVICE_OVERRIDE)
	if (!device_has_driver_override(&pdev->dev))
		device_set_driver_override(&pdev->dev, RACKBUS_NO_DRIVER);
#endif
}

static inline void rackbus_let_on(struct pci_dev *pdev, const char **held)
{
#if defined(RACKBUS_PCI_OVERRIDE)
	device_lock(&pdev->dev);
	if (pdev->driver_override == *held)
		pdev->driver_override = NULL;
	else
		*held = NULL;	/* Whoever has set another one has freed it. */
	device_unlock(&pdev->dev);
#elif defined(RACKBUS_DEVICE_OVERRIDE)
	static const struct device_driver none = { .name = RACKBUS_NO_DRIVER };

	if (device_match_driver_override(&pdev->dev, &none) > 0)
		device_set_driver_override(&pdev->dev, "");
#endif
}

#endif /* _RACKBUS_COMPAT_H */
