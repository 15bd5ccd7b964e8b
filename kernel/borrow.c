// SPDX-License-Identifier: GPL-2.0
/*
 * RACKBUS_BORROW: reads what the lender says of a function, and makes it appear
 * in this host's PCI tree.
 */
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/slab.h>

#include "compat.h"
#include "internal.h"

#define DEFAULT_VECTORS		8

/* Reads 4 bytes at a time, as a window may not do otherwise. */
static void read_words(void *to, const void __iomem *from, size_t size)
{
	__le32 *words = to;
	size_t n;

	for (n = 0; n < size / 4; n++)
		words[n] = cpu_to_le32(readl(from + 4 * n));
}

static int refused(struct rackbus_function *fn, int error, const char *why)
{
	pci_err(fn->ntb->pdev, "%s is not borrowed: %s\n", fn->name, why);
	return error;
}

static void __iomem *map_page(struct rackbus_function *fn, u64 offset)
{
	return ioremap(fn->ntb->window + fn->offer.area + offset, RACKBUS_PAGE);
}

static int read_offer(struct rackbus_function *fn, u64 area, u64 epoch)
{
	struct rackbus_window_header raw;
	const char *why = NULL;
	int ret;

	if (!rackbus_inside(area, RACKBUS_PAGE, fn->ntb->window_size) ||
	    area & (RACKBUS_PAGE - 1))
		return -EINVAL;
	fn->offer.area = area;
	fn->header = map_page(fn, 0);
	if (!fn->header)
		return -ENOMEM;
	read_words(&raw, fn->header, sizeof(raw));
	ret = rackbus_offer_check(&raw, area, fn->ntb->window_size, epoch,
				  &fn->offer, &why);
	if (ret)
		return refused(fn, ret, why);
	fn->heartbeat = fn->offer.heartbeat;
	fn->heartbeat_at = ktime_get();
	return 0;
}

static int read_config(struct rackbus_function *fn)
{
	void __iomem *page = map_page(fn, fn->offer.config_offset);
	const char *why = NULL;
	u8 *image;
	int ret;

	image = kmalloc(RACKBUS_CONFIG_READ, GFP_KERNEL);
	fn->config = kzalloc(sizeof(*fn->config), GFP_KERNEL);
	if (!page || !image || !fn->config) {
		ret = -ENOMEM;
		goto out;
	}
	read_words(image, page, RACKBUS_CONFIG_READ);
	ret = rackbus_config_make(fn->config, image, &fn->offer, fn->vectors,
				  &why);
	if (ret)
		refused(fn, ret, why);
out:
	kfree(image);
	if (page)
		iounmap(page);
	return ret;
}

/* -EAGAIN: who had it has lost it, and the lender hears only now. */
static int release_former(struct rackbus_function *fn)
{
	u32 last = (fn->producer - 1) & (fn->offer.ring_entries - 1);
	struct rackbus_window_request request;

	read_words(&request, fn->ring +
		   offsetof(struct rackbus_window_ring, entries) +
		   last * sizeof(request), sizeof(request));
	if (rackbus_ring_released(fn->producer, &request))
		return 0;
	rackbus_release_request(fn, rackbus_release_time());
	return -EAGAIN;
}

/*
 * The lender may be resetting the device for who has just let it go: what this
 * host would write meanwhile were lost.  Or it was lost here, and the lender
 * has it as it was then: it may be isolated, with mappings.  Who borrows tries
 * again.
 */
static int open_ring(struct rackbus_function *fn)
{
	int ret;

	fn->ring = map_page(fn, fn->offer.ring_offset);
	if (!fn->ring)
		return -ENOMEM;
	fn->producer = readl(fn->ring + offsetof(struct rackbus_window_ring,
						 producer));
	fn->consumer = readl(fn->ring + offsetof(struct rackbus_window_ring,
						 consumer));
	ret = rackbus_ring_idle(fn->producer, fn->consumer,
				fn->offer.ring_entries);
	if (ret == -EPROTO)
		refused(fn, ret, "the ring has more than it holds");
	if (!ret)
		ret = release_former(fn);
	if (ret) {
		/* Nothing is to be said in it. */
		iounmap(fn->ring);
		fn->ring = NULL;
	}
	return ret;
}

/* Whether the device and this host can reach each other. */
static int check_dma(struct rackbus_function *fn)
{
	if (fn->offer.direct && rackbus_dma_is_translated(fn->dma_device))
		return refused(fn, -EPERM,
			       "the NTB's window passes by this host's IOMMU, which translates (boot with iommu=pt)");
	return 0;
}

/*
 * Memory that the window does not cover is bounced.  The mask that says so is
 * the NTB's, and so that of all functions behind it: it is made for the first
 * one, and is not changed under those that have mapped memory with it.
 */
static int set_dma_mask(struct rackbus_function *fn)
{
	struct device *dev = &fn->ntb->pdev->dev;
	u64 mask = DMA_BIT_MASK(ilog2(fn->offer.dma_size));

	if (rackbus_any_behind(fn->ntb)) {
		if (mask < dma_get_mask(dev))
			return refused(fn, -ERANGE,
				       "the window onto memory is smaller than what functions that are borrowed need");
		return 0;
	}
	if (dma_set_mask_and_coherent(dev, mask))
		return refused(fn, -ERANGE,
			       "the window onto this host's memory is too small");
	return 0;
}

void rackbus_close(struct rackbus_function *fn)
{
	if (fn->header)
		iounmap(fn->header);
	if (fn->ring)
		iounmap(fn->ring);
}

/* Everything of it but its bus. */
static int prepare(struct rackbus_function *fn,
		   const struct rackbus_borrow *borrow)
{
	unsigned int wanted = borrow->vectors ?: DEFAULT_VECTORS;
	int ret;

	if (READ_ONCE(fn->ntb->closed))
		return refused(fn, -ESHUTDOWN,
			       "the NTB is closed until it is bound anew");
	/* Who borrows tries again: it trains for a while, and locks are held. */
	if (!rackbus_ntb_link_up(fn->ntb))
		return refused(fn, -ENOLINK, "the NTB's link is down");
	ret = read_offer(fn, borrow->offset, borrow->epoch);
	if (!ret && rackbus_overlaps(fn))
		ret = -EEXIST;
	/* Early: the lender hears of what is refused from here on. */
	if (!ret)
		ret = open_ring(fn);
	if (!ret)
		ret = check_dma(fn);
	if (!ret)
		ret = rackbus_ntb_vectors_get(fn->ntb, fn,
					      min(wanted, fn->offer.vectors));
	if (!ret)
		ret = read_config(fn);
	/* Last: an offer that is refused changes nothing for others. */
	if (!ret)
		ret = set_dma_mask(fn);
	return ret;
}

/*
 * With all locks. What fails leaves nothing behind.  Drivers are held off from
 * the device, which is returned with a reference.
 */
static int attach(struct rackbus_function *fn,
		  const struct rackbus_borrow *borrow, struct pci_dev **device)
{
	int ret;

	ret = prepare(fn, borrow);
	if (ret)
		goto forget;
	ret = rackbus_enter(fn);
	if (ret)
		goto forget;
	ret = rackbus_irq_create(fn);
	if (ret)
		goto leave;
	ret = rackbus_bus_create(fn);
	if (ret)
		goto remove_irqs;
	queue_delayed_work(rackbus_watches, &fn->watch, 0);
	pci_info(fn->ntb->pdev, "%s is borrowed: domain %04x, %u vectors\n",
		 fn->name, fn->sysdata.domain, fn->vectors);
	*device = pci_get_slot(fn->bus, 0);
	rackbus_hold_off(*device, &fn->held);
	pci_bus_add_devices(fn->bus);
	return 0;

remove_irqs:
	rackbus_irq_remove(fn);
leave:
	mutex_lock(&rackbus_lock);
	rackbus_leave(fn);
	mutex_unlock(&rackbus_lock);
	rackbus_let_unload();
forget:
	/* The lender keeps its place in the window for who may be using it. */
	if (fn->ring)
		rackbus_release_request(fn, rackbus_release_time());
	rackbus_silence(fn);
	rackbus_ntb_vectors_put(fn->ntb, fn);
	rackbus_close(fn);
	return ret;
}

/*
 * Without locks: a driver takes as long as it likes, minutes with a device that
 * hangs, and all that is plugged into this host would wait.
 */
static void find_driver(struct rackbus_function *fn, struct pci_dev *device)
{
	bool wanted;
	int ret;

	rackbus_let_on(device, &fn->held);
	mutex_lock(&rackbus_lock);
	wanted = fn->state == RACKBUS_STATE_BORROWED;
	mutex_unlock(&rackbus_lock);
	ret = wanted ? device_attach(&device->dev) : 0;
	if (ret < 0 && ret != -EPROBE_DEFER)
		pci_warn(device, "rackbus: no driver could be bound (%d)\n",
			 ret);
}

int rackbus_borrow(struct rackbus_borrow *borrow)
{
	struct pci_dev *device = NULL;
	struct rackbus_function *fn;
	struct pci_dev *pdev;
	int ret = -ENODEV;

	pdev = pci_get_domain_bus_and_slot(borrow->ntb.domain, borrow->ntb.bus,
					   borrow->ntb.devfn);
	if (!pdev)
		return -ENODEV;
	fn = rackbus_function_make(borrow, pdev);
	if (!fn) {
		pci_dev_put(pdev);
		return -ENOMEM;
	}
	pci_lock_rescan_remove();
	device_lock(&pdev->dev);
	if (pci_dev_driver(pdev) == &rackbus_ntb_driver) {
		fn->ntb = pci_get_drvdata(pdev);
		ret = attach(fn, borrow, &device);
	}
	device_unlock(&pdev->dev);
	pci_unlock_rescan_remove();
	pci_dev_put(pdev);
	if (device)
		find_driver(fn, device);
	complete_all(&fn->tried);
	pci_dev_put(device);
	borrow->handle = fn->handle;
	borrow->domain = fn->sysdata.domain;
	rackbus_function_put(fn);
	if (!ret)
		rackbus_changed();
	return ret;
}
