// SPDX-License-Identifier: GPL-2.0
/*
 * Who uses the disks of a borrowed function, which an orderly return asks.
 *
 * NVMe's native multipath hides the disks below a controller that may have
 * siblings: they are ways to a disk (the head) that is below the NVMe subsystem,
 * and that works as long as one of its ways does.  What ties them together is
 * private to nvme, but for their names: the way nvme0c1n2 leads to nvme0n2.
 */
#include <linux/blkdev.h>
#include <linux/err.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "compat.h"
#include "internal.h"

/* A disk that goes with a function. */
struct rackbus_disk {
	struct list_head entry;
	dev_t number;
	bool asked;			/* has been tried to be had exclusively */
	bool goes;			/* the last look found that it goes */
	rackbus_claim claim;		/* NULL: it is not */
};

/* With rackbus_lock. */
struct look {
	struct rackbus_function *fn;
	struct list_head *disks;
	bool open;
	int error;
};

/* The head of a way, by name, and who wants to know whether it has others. */
struct head {
	struct rackbus_function *fn;
	char name[DISK_NAME_LEN];
};

static bool is_disk(const struct device *dev)
{
	return dev->class && !strcmp(dev->class->name, "block") && dev->type &&
	       !strcmp(dev->type->name, "disk");
}

/* Whether it is one of the ways to a disk, whose name is then in head. */
static bool is_way(struct device *dev, char *head)
{
	unsigned int subsystem, controller, namespace;

	if (!(dev_to_disk(dev)->flags & GENHD_FL_HIDDEN) ||
	    sscanf(dev_name(dev), "nvme%uc%un%u", &subsystem, &controller,
		   &namespace) != 3)
		return false;
	snprintf(head, DISK_NAME_LEN, "nvme%un%u", subsystem, namespace);
	return true;
}

static int is_or_has(struct device *dev, void *other)
{
	return dev == other || device_for_each_child(dev, other, is_or_has);
}

/* From above, as a device that is being removed may outlive its parent. */
static bool is_below(struct device *dev, struct rackbus_function *fn)
{
	struct pci_dev *pdev = rackbus_device(fn);
	bool below = pdev && is_or_has(&pdev->dev, dev);

	pci_dev_put(pdev);
	return below;
}

/* Whether a disk is a way that works, and stays when the function goes. */
static int is_other_way(struct device *dev, void *data)
{
	struct rackbus_function *fn;
	struct head *head = data;
	char name[DISK_NAME_LEN];
	struct gendisk *disk;

	if (!is_disk(dev) || !is_way(dev, name) || strcmp(name, head->name))
		return 0;
	disk = dev_to_disk(dev);
	/* nvme lets nothing through while a controller is reset or removed. */
	if (test_bit(GD_DEAD, &disk->state) || blk_queue_quiesced(disk->queue))
		return 0;
	list_for_each_entry(fn, &rackbus_functions, entry)
		if ((fn == head->fn || fn->state != RACKBUS_STATE_BORROWED) &&
		    is_below(dev, fn))
			return 0;
	return 1;
}

static struct rackbus_disk *find(struct list_head *disks, dev_t number)
{
	struct rackbus_disk *disk;

	list_for_each_entry(disk, disks, entry)
		if (disk->number == number)
			return disk;
	return NULL;
}

/* A disk that goes with the function. */
static int look_at_disk(struct look *look, struct gendisk *gendisk)
{
	dev_t number = disk_devt(gendisk);
	struct rackbus_disk *disk = find(look->disks, number);
	unsigned int own = disk && disk->claim;

	if (disk_openers(gendisk) > own)
		look->open = true;
	if (disk) {
		disk->goes = true;
		return 0;
	}
	/* Losses are noticed with rackbus_lock: no I/O for memory. */
	disk = kzalloc(sizeof(*disk), GFP_NOIO);
	if (!disk)
		return -ENOMEM;
	disk->number = number;
	disk->goes = true;
	list_add_tail(&disk->entry, look->disks);
	look->error = -EAGAIN;
	return 0;
}

/* The disk that a way of the function leads to, unless it has another one. */
static int look_at_head(struct look *look, struct device *way,
			struct head *head)
{
	struct device *dev;
	int ret = 0;

	if (class_for_each_device(way->class, NULL, head, is_other_way))
		return 0;
	dev = class_find_device_by_name(way->class, head->name);
	if (dev && is_disk(dev))
		ret = look_at_disk(look, dev_to_disk(dev));
	put_device(dev);
	return ret;
}

static int look_below(struct device *dev, void *data)
{
	struct look *look = data;
	struct head head = { .fn = look->fn };
	int ret = 0;

	if (is_disk(dev))
		ret = is_way(dev, head.name) ?
		      look_at_head(look, dev, &head) :
		      look_at_disk(look, dev_to_disk(dev));
	return ret ?: device_for_each_child(dev, data, look_below);
}

/*
 * With rackbus_lock: looks at the disks that go with a function, and adds to the
 * list those that are not in it.  -EBUSY: somebody else has one open.  -EAGAIN:
 * some were added.
 */
int rackbus_look_at_disks(struct rackbus_function *fn, struct list_head *disks)
{
	struct look look = { .fn = fn, .disks = disks };
	struct pci_dev *pdev = rackbus_device(fn);
	struct rackbus_disk *disk;
	int ret;

	list_for_each_entry(disk, disks, entry)
		disk->goes = false;
	ret = pdev ? look_below(&pdev->dev, &look) : 0;
	pci_dev_put(pdev);
	if (ret)
		return ret;
	return look.open ? -EBUSY : look.error;
}

/*
 * Has the listed disks exclusively, so that nobody mounts one, or a partition of
 * it, from now on.  -EBUSY: somebody else has.  One that cannot be opened, as
 * there is no medium in it or it is just going, is nothing that others can use.
 */
int rackbus_claim_disks(struct list_head *disks)
{
	struct rackbus_disk *disk;
	rackbus_claim claim;

	list_for_each_entry(disk, disks, entry) {
		if (disk->asked)
			continue;
		claim = rackbus_claim_get(disk->number, disk);
		if (!IS_ERR(claim))
			disk->claim = claim;
		else if (PTR_ERR(claim) == -EBUSY)
			return -EBUSY;
		disk->asked = true;
	}
	return 0;
}

/*
 * Takes disks out of the list: all, or those that have another way by now and
 * stay.
 */
void rackbus_release_disks(struct list_head *disks, bool all)
{
	struct rackbus_disk *disk, *next;

	list_for_each_entry_safe(disk, next, disks, entry) {
		if (disk->goes && !all)
			continue;
		if (disk->claim)
			rackbus_claim_put(disk->claim, disk);
		list_del(&disk->entry);
		kfree(disk);
	}
}
