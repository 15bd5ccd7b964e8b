// SPDX-License-Identifier: GPL-2.0
/*
 * The root bus of a borrowed function, in a PCI domain of its own: its
 * configuration space, and the ring by which the lender hears of it.
 *
 * Accessors of configuration space must not sleep (user space's hold a raw
 * lock), so reads are answered from the shadow, and writes are left in the ring
 * for the lender, which carries them out in its time.
 */
#include <linux/delay.h>
#include <linux/dma-map-ops.h>
#include <linux/io.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/irqdomain.h>
#include <linux/jiffies.h>
#include <linux/rcupdate.h>
#include <linux/wait.h>

#include "compat.h"
#include "internal.h"

/*
 * An accessor waits for a fifth of the time that a lender may be silent, and
 * not for long where interrupts are off: user space's accesses hold a raw lock.
 */
#define PATIENCE	5
#define MOST_PATIENCE_MS	100

/*
 * A lender that misses a release keeps the function's place in the window from
 * others until the link goes down.  It may be at a reset of the device.
 */
#define RELEASE_PATIENCE_MS	1000

/*
 * How long a lender that lives may take to answer: it may be at a reset, and
 * closes and opens the device where that is isolated.
 */
#define ANSWER_PATIENCE_MS	20000

#define PRODUCER	offsetof(struct rackbus_window_ring, producer)
#define CONSUMER	offsetof(struct rackbus_window_ring, consumer)
#define ENTRIES		offsetof(struct rackbus_window_ring, entries)
#define MAPPING		offsetof(struct rackbus_window_ring, mapping)
#define RESULT		offsetof(struct rackbus_window_ring, mapping.result)

/* With config_lock, as are all below that do not take it. */
static u32 read_consumer(struct rackbus_function *fn)
{
	fn->consumer = readl(fn->ring + CONSUMER);
	return fn->consumer;
}

/* -EAGAIN: the ring is full. */
static int say(struct rackbus_function *fn, u32 kind, u32 size, u32 offset,
	       u32 value)
{
	u32 entries = fn->offer.ring_entries;
	struct rackbus_window_request request;
	const __le32 *words = (const __le32 *)&request;
	void __iomem *entry;
	unsigned int n;

	if (!rackbus_ring_room(fn->producer, fn->consumer, entries) &&
	    !rackbus_ring_room(fn->producer, read_consumer(fn), entries))
		return -EAGAIN;
	request = rackbus_ring_entry(fn->producer, kind, size, offset, value,
				     fn->offer.epoch);
	entry = fn->ring + ENTRIES +
		(fn->producer & (entries - 1)) * sizeof(request);
	for (n = 0; n < sizeof(request) / sizeof(*words); n++)
		writel(le32_to_cpu(words[n]), entry + n * sizeof(*words));
	fn->producer++;
	writel(fn->producer, fn->ring + PRODUCER);
	if (fn->offer.doorbell != RACKBUS_NO_DOORBELL)
		rackbus_ntb_ring(fn->ntb, fn->offer.doorbell);
	atomic64_inc(&fn->writes_forwarded);
	return 0;
}

/* Whether the device is still being reset.  What is refused was no reset. */
static bool resetting(struct rackbus_function *fn)
{
	if (fn->resetting &&
	    rackbus_ring_passed(read_consumer(fn), fn->reset_after)) {
		if (!fn->reset_answered || !readl(fn->ring + RESULT))
			rackbus_config_reset(fn->config);
		fn->resetting = false;
	}
	return fn->resetting;
}

/* The function at this place, unless the place is empty. */
static struct rackbus_function *function_at(struct pci_bus *bus,
					    unsigned int devfn)
{
	return bus->number || devfn ? NULL : to_rackbus_function(bus);
}

static int rackbus_config_get(struct pci_bus *bus, unsigned int devfn,
			      int where, int size, u32 *value)
{
	struct rackbus_function *fn = function_at(bus, devfn);
	unsigned long flags;
	bool gone;

	*value = ~0;
	if (!fn)
		return PCIBIOS_DEVICE_NOT_FOUND;
	raw_spin_lock_irqsave(&fn->config_lock, flags);
	gone = fn->gone;
	if (!gone && !resetting(fn))
		*value = rackbus_config_read(fn->config, where, size);
	raw_spin_unlock_irqrestore(&fn->config_lock, flags);
	return gone ? PCIBIOS_DEVICE_NOT_FOUND : PCIBIOS_SUCCESSFUL;
}

/*
 * One attempt to write: -EAGAIN when the lender has to hear of it and cannot
 * yet.  Sets until when the lender should have done what the driver relies on.
 */
static int try_write(struct rackbus_function *fn, int where, int size,
		     u32 value, u32 *wait, bool *waits)
{
	struct rackbus_change change;
	int ret = 0;

	if (fn->gone)
		return -ENODEV;
	/* As a device does: what arrives during a reset is lost. */
	if (resetting(fn))
		return 0;
	rackbus_config_write(fn->config, where, size, value, &change);
	if (change.kind)
		ret = say(fn, change.kind, change.size, change.offset,
			  change.value);
	if (ret)
		return ret;
	rackbus_config_commit(fn->config, &change);
	*wait = fn->producer;
	*waits = change.master_on;
	if (change.kind == RACKBUS_REQUEST_RESET) {
		fn->resetting = true;
		fn->reset_answered = false;
		fn->reset_after = fn->producer;
		atomic64_inc(&fn->resets);
	}
	return 0;
}

static bool over(ktime_t since)
{
	unsigned int patience = READ_ONCE(rackbus_silence_ms) / PATIENCE;

	if (irqs_disabled())
		patience = min_t(unsigned int, patience, MOST_PATIENCE_MS);
	return ktime_ms_delta(ktime_get(), since) > patience;
}

/* The device masters the bus when the driver goes on, or it would fail. */
static void wait_for_lender(struct rackbus_function *fn, u32 after,
			    ktime_t since)
{
	unsigned long flags;
	bool done;

	for (;;) {
		raw_spin_lock_irqsave(&fn->config_lock, flags);
		done = fn->gone || rackbus_ring_passed(read_consumer(fn), after);
		raw_spin_unlock_irqrestore(&fn->config_lock, flags);
		if (done)
			return;
		if (over(since))
			break;
		udelay(50);
	}
	atomic64_inc(&fn->waits_late);
}

static int rackbus_config_set(struct pci_bus *bus, unsigned int devfn,
			      int where, int size, u32 value)
{
	struct rackbus_function *fn = function_at(bus, devfn);
	ktime_t since = ktime_get();
	unsigned long flags;
	bool waits = false;
	u32 wait = 0;
	int ret;

	if (!fn)
		return PCIBIOS_DEVICE_NOT_FOUND;
	for (;;) {
		raw_spin_lock_irqsave(&fn->config_lock, flags);
		ret = try_write(fn, where, size, value, &wait, &waits);
		raw_spin_unlock_irqrestore(&fn->config_lock, flags);
		if (ret != -EAGAIN)
			break;
		if (over(since)) {
			atomic64_inc(&fn->writes_lost);
			return PCIBIOS_SET_FAILED;
		}
		udelay(50);
	}
	if (ret)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (waits)
		wait_for_lender(fn, wait, since);
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops rackbus_pci_ops = {
	.read = rackbus_config_get,
	.write = rackbus_config_set,
};

bool rackbus_is_function(struct device *dev)
{
	return dev_is_pci(dev) && to_pci_dev(dev)->bus->ops == &rackbus_pci_ops;
}

static int try_ask(struct rackbus_function *fn, u32 kind, u32 value,
		   const struct rackbus_window_mapping *what, u32 *after)
{
	const __le32 *words = (const __le32 *)what;
	unsigned long flags;
	unsigned int n;
	int ret = -ENODEV;

	raw_spin_lock_irqsave(&fn->config_lock, flags);
	if (fn->gone)
		goto out;
	for (n = 0; n < sizeof(*what) / sizeof(*words); n++)
		writel(le32_to_cpu(words[n]),
		       fn->ring + MAPPING + n * sizeof(*words));
	ret = say(fn, kind, 0, 0, value);
	*after = fn->producer;
	if (!ret && kind == RACKBUS_REQUEST_ISOLATE) {
		fn->resetting = true;
		fn->reset_answered = true;
		fn->reset_after = *after;
	}
out:
	raw_spin_unlock_irqrestore(&fn->config_lock, flags);
	return ret;
}

/* -EAGAIN: the lender is not there yet.  Otherwise what it answers. */
static int try_answer(struct rackbus_function *fn, u32 after)
{
	unsigned long flags;
	int ret = -ENODEV;

	raw_spin_lock_irqsave(&fn->config_lock, flags);
	if (fn->gone)
		goto out;
	ret = -EAGAIN;
	if (rackbus_ring_passed(read_consumer(fn), after)) {
		/* Before the next request has another result. */
		resetting(fn);
		ret = rackbus_result(readl(fn->ring + RESULT));
	}
out:
	raw_spin_unlock_irqrestore(&fn->config_lock, flags);
	return ret;
}

/* Until when a lender that lives has answered. */
unsigned long rackbus_answer_time(void)
{
	return jiffies + msecs_to_jiffies(ANSWER_PATIENCE_MS);
}

/*
 * Asks the lender for what takes an answer, and waits for that: -ETIMEDOUT when
 * there is none, and -ENODEV when the function was lost meanwhile.  One at a
 * time (reach_lock).  May sleep.
 */
int rackbus_ask(struct rackbus_function *fn, u32 kind, u32 value,
		const struct rackbus_window_mapping *what)
{
	unsigned long until = rackbus_answer_time();
	u32 after;
	int ret;

	for (;;) {
		ret = try_ask(fn, kind, value, what, &after);
		if (ret != -EAGAIN)
			break;
		if (time_after(jiffies, until))
			return -ETIMEDOUT;
		usleep_range(100, 200);
	}
	while (!ret) {
		ret = try_answer(fn, after);
		if (ret != -EAGAIN)
			return ret;
		if (time_after(jiffies, until))
			return -ETIMEDOUT;
		usleep_range(20, 100);
		ret = 0;
	}
	return ret;
}

static int try_release(struct rackbus_function *fn)
{
	unsigned long flags;
	int ret = 0;

	raw_spin_lock_irqsave(&fn->config_lock, flags);
	if (!fn->gone) {
		ret = say(fn, RACKBUS_REQUEST_RELEASE, 0, 0, 0);
		/* A read passes no write. */
		readl(fn->ring + CONSUMER);
	}
	raw_spin_unlock_irqrestore(&fn->config_lock, flags);
	return ret;
}

/* Until when a lender that lives has made room in its ring. */
unsigned long rackbus_release_time(void)
{
	return jiffies + msecs_to_jiffies(RELEASE_PATIENCE_MS);
}

/*
 * The host has let the function go. Said only to who is there, and again while
 * the ring is full, until the time is over; it has arrived on return, as the
 * host may be off or its link down right after.  May sleep.
 */
void rackbus_release_request(struct rackbus_function *fn, unsigned long until)
{
	while (try_release(fn)) {
		if (time_after(jiffies, until)) {
			atomic64_inc(&fn->writes_lost);
			return;
		}
		usleep_range(1000, 2000);
	}
}

/* From now on all reads give all ones and nothing is said to the lender. */
void rackbus_silence(struct rackbus_function *fn)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&fn->config_lock, flags);
	fn->gone = true;
	raw_spin_unlock_irqrestore(&fn->config_lock, flags);
}

/*
 * Whatever device appears on such a bus, also by a rescan, gets its DMA from
 * here before a driver sees it, and its BARs stay where the lender has them.
 */
static void adopt(struct pci_dev *pdev)
{
	struct rackbus_function *fn = to_rackbus_function(pdev->bus);
	unsigned int n;

	set_dma_ops(&pdev->dev, &rackbus_dma_ops);
	for (n = 0; n < RACKBUS_BARS; n++) {
		if (!fn->offer.bars[n].size)
			continue;
		pdev->resource[n].flags |= IORESOURCE_PCI_FIXED;
		if (pci_claim_resource(pdev, n))
			pci_err(pdev, "rackbus: BAR %u is taken\n", n);
	}
}

static int rackbus_bus_notify(struct notifier_block *block,
			      unsigned long action, void *data)
{
	struct device *dev = data;
	struct pci_dev *pdev;

	if (action == BUS_NOTIFY_DEL_DEVICE)
		rackbus_ntb_gone(dev);
	if (!rackbus_is_function(dev))
		return NOTIFY_OK;
	pdev = to_pci_dev(dev);
	switch (action) {
	case BUS_NOTIFY_ADD_DEVICE:
		adopt(pdev);
		break;
	case BUS_NOTIFY_BIND_DRIVER:
		rackbus_probing(to_rackbus_function(pdev->bus), pdev, true);
		break;
	case BUS_NOTIFY_BOUND_DRIVER:
	case BUS_NOTIFY_DRIVER_NOT_BOUND:
		rackbus_probing(to_rackbus_function(pdev->bus), pdev, false);
		break;
	}
	return NOTIFY_OK;
}

struct notifier_block rackbus_bus_notifier = {
	.notifier_call = rackbus_bus_notify,
};

/* Each BAR has a window of its own; addresses on the bus count from 0. */
static void add_windows(struct rackbus_function *fn, struct list_head *list)
{
	struct rackbus_ntb *ntb = fn->ntb;
	const struct rackbus_bar *bar;
	struct resource *window;
	unsigned int n;

	fn->bus_range = (struct resource) {
		.name = "rackbus bus",
		.flags = IORESOURCE_BUS | IORESOURCE_PCI_FIXED,
	};
	pci_add_resource(list, &fn->bus_range);
	for (n = 0; n < RACKBUS_BARS; n++) {
		bar = &fn->offer.bars[n];
		if (!bar->size)
			continue;
		window = &fn->windows[n];
		*window = (struct resource) {
			.name = "rackbus window",
			.start = ntb->window + bar->offset,
			.end = ntb->window + bar->offset +
			       rackbus_span(bar->size) - 1,
			.flags = IORESOURCE_MEM,
			.parent = &ntb->pdev->resource[2],
		};
		pci_add_resource_offset(list, window, ntb->window);
	}
}

/* Whether the function is there, with each BAR where the lender has it. */
static bool is_complete(struct rackbus_function *fn, struct pci_bus *bus)
{
	struct pci_dev *pdev = pci_get_slot(bus, 0);
	bool ok = pdev;
	unsigned int n;

	for (n = 0; ok && n < RACKBUS_BARS; n++) {
		if (!fn->offer.bars[n].size)
			continue;
		ok = pdev->resource[n].parent &&
		     pci_resource_start(pdev, n) ==
		     fn->ntb->window + fn->offer.bars[n].offset;
	}
	pci_dev_put(pdev);
	return ok;
}

/*
 * Whoever has a reference of a device (the driver of a mounted file system's
 * disk has) keeps its bus and bridge, and needs the function for what it still
 * frees: DMA memory, for one.
 */
static atomic_t bridges = ATOMIC_INIT(0);
static DECLARE_WAIT_QUEUE_HEAD(bridge_released);

static void rackbus_bridge_released(struct pci_host_bridge *bridge)
{
	rackbus_function_put(bridge->release_data);
	rcu_read_lock();
	if (atomic_dec_and_test(&bridges))
		wake_up_all(&bridge_released);
	rcu_read_unlock();
}

static void keep_for_bridge(struct rackbus_function *fn,
			    struct pci_host_bridge *bridge)
{
	kref_get(&fn->ref);
	atomic_inc(&bridges);
	pci_set_host_bridge_release(bridge, rackbus_bridge_released, fn);
}

/* The module goes when nobody has a device of a bus of it. */
void rackbus_wait_for_bridges(void)
{
	if (!wait_event_idle_timeout(bridge_released, !atomic_read(&bridges),
				     HZ)) {
		pr_warn("rackbus: waiting for who still uses returned devices (unmount their file systems)\n");
		wait_event_idle(bridge_released, !atomic_read(&bridges));
	}
	synchronize_rcu();
}

/*
 * With pci_lock_rescan_remove(): makes the bus with the function on it, and no
 * driver yet.
 */
int rackbus_bus_create(struct rackbus_function *fn)
{
	struct pci_bus *bus;
	LIST_HEAD(list);
	int domain;

	domain = rackbus_domain_get();
	if (domain < 0)
		return domain;
	fn->sysdata.domain = domain;
	fn->sysdata.node = dev_to_node(&fn->ntb->pdev->dev);
	add_windows(fn, &list);
	bus = pci_create_root_bus(&fn->ntb->pdev->dev, 0, &rackbus_pci_ops,
				  &fn->sysdata, &list);
	if (!bus) {
		pci_free_resource_list(&list);
		rackbus_domain_put(domain);
		return -ENOMEM;
	}
	keep_for_bridge(fn, to_pci_host_bridge(bus->bridge));
	if (fn->irq_domain)
		dev_set_msi_domain(&bus->dev, fn->irq_domain);
	pci_scan_child_bus(bus);
	if (!is_complete(fn, bus)) {
		rackbus_bus_remove(fn, bus);
		return -EPROTO;
	}
	mutex_lock(&rackbus_lock);
	fn->bus = bus;
	mutex_unlock(&rackbus_lock);
	return 0;
}

void rackbus_bus_remove(struct rackbus_function *fn, struct pci_bus *bus)
{
	struct pci_host_bridge *bridge = to_pci_host_bridge(bus->bridge);

	pci_stop_root_bus(bus);
	pci_remove_root_bus(bus);
	/* Who created the bridge has a reference of it, which is not given up. */
	pci_free_host_bridge(bridge);
	rackbus_domain_put(fn->sysdata.domain);
}
