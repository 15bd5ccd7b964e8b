// SPDX-License-Identifier: GPL-2.0
/*
 * The NTB that borrowed functions are behind: Intel's of the third generation
 * (8086:201c), or one in software with the same registers.
 *
 * The driver has no table of devices: it binds only to what it is told to by
 * driver_override, so that it takes no NTB from ntb_hw_intel or from vfio-pci.
 */
#include <linux/bitmap.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pm.h>

#include "internal.h"

#define DEVICE_INTEL_NTB_GEN3	0x201c

/* Configuration space. */
#define LINK_STATUS		0x1a2
#define LINK_UP			BIT(13)

/* BAR 0. */
#define NTBCNTL			0x0000
#define  CNTL_CONFIG_LOCK	BIT(0)
#define  CNTL_DISABLE		BIT(1)
#define  CNTL_SNOOP		(BIT(2) | BIT(4) | BIT(6) | BIT(8))
#define IMBAR_XBASE(n)		(0x0010 + 0x10 * (n))
#define IMBAR_XLIMIT(n)		(0x0018 + 0x10 * (n))
#define INTERRUPT_STATUS	0x0040
#define INTERRUPT_DISABLE	0x0048
#define INTERRUPT_VECTOR(bit)	(0x00d0 + (bit))
#define PEER_DOORBELL(bit)	(0x0100 + 4 * (bit))
#define EMBAR_XLIMIT(n)		(0x4018 + 0x10 * (n))
#define SECONDARY_COMMAND	0x4504
#define EMBAR(n)		(0x4518 + 8 * (n))
#define REGISTERS_SIZE		0x8000

#define LINK_DOORBELL		32
#define ALL_DOORBELLS		GENMASK_ULL(32, 0)

/*
 * One vector is for the link, the others are for functions.  The adapter's
 * last one, of 33, does not work in hardware of this generation.
 */
#define MIN_VECTORS		2
#define MAX_VECTORS		32

bool rackbus_ntb_link_up(struct rackbus_ntb *ntb)
{
	u16 status;

	if (READ_ONCE(ntb->closed))
		return false;
	if (pci_read_config_word(ntb->pdev, LINK_STATUS, &status))
		return false;
	return status != 0xffff && status & LINK_UP;
}

/* Any context. The lender looks at its rings. */
void rackbus_ntb_ring(struct rackbus_ntb *ntb, u32 doorbell)
{
	writel(1, ntb->regs + PEER_DOORBELL(doorbell));
}

/* With the NTB's device_lock(). */
int rackbus_ntb_vectors_get(struct rackbus_ntb *ntb,
			    struct rackbus_function *fn, unsigned int wanted)
{
	unsigned int n;

	for (n = 0; n < ntb->vectors && fn->vectors < wanted; n++) {
		if (test_and_set_bit(n, ntb->used))
			continue;
		fn->vector[fn->vectors++].index = n;
	}
	return wanted && !fn->vectors ? -ENOSPC : 0;
}

/* With the NTB's device_lock(). */
void rackbus_ntb_vectors_put(struct rackbus_ntb *ntb,
			     struct rackbus_function *fn)
{
	unsigned int k;

	for (k = 0; k < fn->vectors; k++)
		clear_bit(fn->vector[k].index, ntb->used);
}

static void link_work(struct work_struct *work)
{
	struct rackbus_ntb *ntb =
		container_of(work, struct rackbus_ntb, link_work);

	if (rackbus_ntb_link_up(ntb)) {
		pci_info(ntb->pdev, "link is up\n");
		return;
	}
	pci_info(ntb->pdev, "link is down\n");
	rackbus_lose_all(ntb, RACKBUS_REASON_LINK);
}

static irqreturn_t link_interrupt(int irq, void *data)
{
	struct rackbus_ntb *ntb = data;

	writeq(BIT_ULL(LINK_DOORBELL), ntb->regs + INTERRUPT_STATUS);
	queue_work(rackbus_watches, &ntb->link_work);
	return IRQ_HANDLED;
}

static int write_checked(struct rackbus_ntb *ntb, u32 at, u64 value)
{
	writeq(value, ntb->regs + at);
	if (readq(ntb->regs + at) == value)
		return 0;
	pci_err(ntb->pdev, "register %#x does not take %#llx\n", at, value);
	return -EIO;
}

/*
 * Where accesses of the other host go that come through its window n (from 0):
 * to base and on, as far as the window is wide.
 */
static int translate(struct rackbus_ntb *ntb, unsigned int n, u64 base)
{
	unsigned int bar = 2 + 2 * n;
	u64 size = pci_resource_len(ntb->pdev, bar);
	u64 outer = readq(ntb->regs + EMBAR(n)) & ~0xfull;
	int ret;

	ret = write_checked(ntb, IMBAR_XBASE(n), base);
	if (!ret)
		ret = write_checked(ntb, IMBAR_XLIMIT(n),
				    pci_resource_start(ntb->pdev, bar) + size);
	if (!ret)
		ret = write_checked(ntb, EMBAR_XLIMIT(n), outer + size);
	return ret;
}

/* Window 1 leads to the local APICs, window 2 to memory from its beginning. */
static int start(struct rackbus_ntb *ntb)
{
	u32 control;
	int ret;

	writeq(ALL_DOORBELLS, ntb->regs + INTERRUPT_DISABLE);
	ret = translate(ntb, 0, RACKBUS_MSI_ADDRESS & ~(ntb->window_size - 1));
	if (!ret)
		ret = translate(ntb, 1, 0);
	if (ret)
		return ret;
	writew(PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER,
	       ntb->regs + SECONDARY_COMMAND);
	writeb(ntb->vectors, ntb->regs + INTERRUPT_VECTOR(LINK_DOORBELL));
	writeq(ALL_DOORBELLS, ntb->regs + INTERRUPT_STATUS);
	writeq(ALL_DOORBELLS & ~BIT_ULL(LINK_DOORBELL),
	       ntb->regs + INTERRUPT_DISABLE);
	control = readl(ntb->regs + NTBCNTL);
	control &= ~(CNTL_CONFIG_LOCK | CNTL_DISABLE);
	writel(control | CNTL_SNOOP, ntb->regs + NTBCNTL);
	return 0;
}

/* The other host reaches nothing of this one any more. */
static void stop(struct rackbus_ntb *ntb)
{
	u32 control = readl(ntb->regs + NTBCNTL);

	writeq(ALL_DOORBELLS, ntb->regs + INTERRUPT_DISABLE);
	writel(control | CNTL_DISABLE | CNTL_CONFIG_LOCK, ntb->regs + NTBCNTL);
	/* It is there before bus mastering is off. */
	readl(ntb->regs + NTBCNTL);
}

/*
 * For good, until the driver is bound anew: nothing of the other host's arrives
 * here after this, and all functions are lost.  May sleep.
 */
void rackbus_ntb_close(struct rackbus_ntb *ntb)
{
	mutex_lock(&ntb->close_lock);
	if (!ntb->closed) {
		stop(ntb);
		/* Its answer comes after all that was on its way to here. */
		pci_clear_master(ntb->pdev);
		if (!pci_wait_for_pending_transaction(ntb->pdev))
			pci_err(ntb->pdev, "what it reads of this host does not end\n");
		WRITE_ONCE(ntb->closed, true);
		pci_err(ntb->pdev, "closed, as a lender does not say that a device of its reaches memory no more: return its functions and bind it anew (rackbus metal reopen)\n");
	}
	mutex_unlock(&ntb->close_lock);
	rackbus_lose_all(ntb, RACKBUS_REASON_SILENT);
}

static int check(struct pci_dev *pdev)
{
	if (pdev->vendor != PCI_VENDOR_ID_INTEL ||
	    pdev->device != DEVICE_INTEL_NTB_GEN3) {
		pci_err(pdev, "no NTB that this module knows (8086:201c)\n");
		return -ENODEV;
	}
	if (pci_resource_len(pdev, 0) < REGISTERS_SIZE ||
	    !(pci_resource_flags(pdev, 2) & IORESOURCE_MEM) ||
	    !is_power_of_2(pci_resource_len(pdev, 2)) ||
	    pci_resource_len(pdev, 2) < RACKBUS_MSI_SIZE ||
	    !pci_resource_len(pdev, 4)) {
		pci_err(pdev, "the NTB lacks a window, or has no address for it\n");
		return -ENODEV;
	}
	return 0;
}

static int set_up_link_irq(struct rackbus_ntb *ntb)
{
	int ret = pci_alloc_irq_vectors(ntb->pdev, MIN_VECTORS, MAX_VECTORS,
					PCI_IRQ_MSIX);

	if (ret < 0)
		return ret;
	ntb->vectors = ret - 1;
	ntb->link_irq = pci_irq_vector(ntb->pdev, ntb->vectors);
	ret = request_irq(ntb->link_irq, link_interrupt, 0, "rackbus-link",
			  ntb);
	if (ret)
		pci_free_irq_vectors(ntb->pdev);
	return ret;
}

static void free_link_irq(struct rackbus_ntb *ntb)
{
	free_irq(ntb->link_irq, ntb);
	cancel_work_sync(&ntb->link_work);
}

static int rackbus_ntb_probe(struct pci_dev *pdev,
			     const struct pci_device_id *id)
{
	struct rackbus_ntb *ntb;
	int ret;

	ret = check(pdev);
	if (ret)
		return ret;
	ntb = devm_kzalloc(&pdev->dev, sizeof(*ntb), GFP_KERNEL);
	if (!ntb)
		return -ENOMEM;
	ntb->pdev = pdev;
	mutex_init(&ntb->close_lock);
	INIT_WORK(&ntb->link_work, link_work);
	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;
	ntb->window = pci_resource_start(pdev, 2);
	ntb->window_size = pci_resource_len(pdev, 2);
	ntb->regs = pcim_iomap(pdev, 0, 0);
	if (!ntb->regs)
		return -ENOMEM;
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (ret)
		return ret;
	pci_set_master(pdev);
	ret = set_up_link_irq(ntb);
	if (ret)
		return ret;
	ret = start(ntb);
	if (ret) {
		stop(ntb);
		free_link_irq(ntb);
		pci_free_irq_vectors(pdev);
		return ret;
	}
	pci_set_drvdata(pdev, ntb);
	pci_info(pdev, "ready: window of %llu MiB, %u vectors, link %s\n",
		 ntb->window_size >> 20, ntb->vectors,
		 rackbus_ntb_link_up(ntb) ? "up" : "down");
	return 0;
}

static void rackbus_ntb_remove(struct pci_dev *pdev)
{
	struct rackbus_ntb *ntb = pci_get_drvdata(pdev);

	free_link_irq(ntb);
	rackbus_detach_all(ntb);
	stop(ntb);
	pci_free_irq_vectors(pdev);
	pci_clear_master(pdev);
}

/* Drivers of borrowed functions were shut down before, being below this. */
static void rackbus_ntb_shutdown(struct pci_dev *pdev)
{
	struct rackbus_ntb *ntb = pci_get_drvdata(pdev);

	free_link_irq(ntb);
	rackbus_quiesce_all(ntb);
	stop(ntb);
	pci_clear_master(pdev);
}

/* Only with nothing borrowed; see suspend_notify(). */
static int rackbus_ntb_suspend(struct device *dev)
{
	struct rackbus_ntb *ntb = dev_get_drvdata(dev);

	stop(ntb);
	return 0;
}

static int rackbus_ntb_resume(struct device *dev)
{
	struct rackbus_ntb *ntb = dev_get_drvdata(dev);

	return ntb->closed ? 0 : start(ntb);
}

static DEFINE_SIMPLE_DEV_PM_OPS(rackbus_ntb_pm, rackbus_ntb_suspend,
				rackbus_ntb_resume);

struct pci_driver rackbus_ntb_driver = {
	.name = "rackbus",
	.id_table = NULL,	/* driver_override only */
	.probe = rackbus_ntb_probe,
	.remove = rackbus_ntb_remove,
	.shutdown = rackbus_ntb_shutdown,
	.driver.pm = pm_sleep_ptr(&rackbus_ntb_pm),
};
