// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/rackbus: the ioctls, and who waits for changes.  Only root opens it.
 */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "internal.h"

#define DEFAULT_TIMEOUT_MS	(10 * 1000)
#define MAX_TIMEOUT_MS		(10 * 60 * 1000)

/* What a descriptor has been told of. */
struct reader {
	u64 seen;
};

static atomic64_t changes = ATOMIC64_INIT(0);
static DECLARE_WAIT_QUEUE_HEAD(changed);

/* Some function's state is another. */
void rackbus_changed(void)
{
	atomic64_inc(&changes);
	wake_up_interruptible(&changed);
}

static int rackbus_open(struct inode *inode, struct file *file)
{
	struct reader *reader = kzalloc(sizeof(*reader), GFP_KERNEL);

	if (!reader)
		return -ENOMEM;
	reader->seen = atomic64_read(&changes);
	file->private_data = reader;
	return nonseekable_open(inode, file);
}

static int rackbus_closed(struct inode *inode, struct file *file)
{
	kfree(file->private_data);
	return 0;
}

static bool news(struct reader *reader)
{
	return atomic64_read(&changes) != READ_ONCE(reader->seen);
}

static ssize_t rackbus_read(struct file *file, char __user *to, size_t size,
			    loff_t *offset)
{
	struct reader *reader = file->private_data;
	u64 now;
	int ret;

	if (size < sizeof(now))
		return -EINVAL;
	if (!news(reader)) {
		if (file->f_flags & O_NONBLOCK)
			return -EAGAIN;
		ret = wait_event_interruptible(changed, news(reader));
		if (ret)
			return ret;
	}
	now = atomic64_read(&changes);
	if (copy_to_user(to, &now, sizeof(now)))
		return -EFAULT;
	WRITE_ONCE(reader->seen, now);
	return sizeof(now);
}

static __poll_t rackbus_poll(struct file *file, poll_table *wait)
{
	poll_wait(file, &changed, wait);
	return news(file->private_data) ? EPOLLIN | EPOLLRDNORM : 0;
}

static long ioctl_borrow(void __user *argument)
{
	struct rackbus_borrow borrow;
	long ret;

	if (copy_from_user(&borrow, argument, sizeof(borrow)))
		return -EFAULT;
	if (borrow.flags || borrow.ntb.reserved || borrow.handle ||
	    borrow.domain || borrow.vectors > RACKBUS_NTB_VECTORS ||
	    strnlen(borrow.name, sizeof(borrow.name)) == sizeof(borrow.name))
		return -EINVAL;
	ret = rackbus_borrow(&borrow);
	if (ret)
		return ret;
	/* Whoever cannot be told finds it in the list. */
	return copy_to_user(argument, &borrow, sizeof(borrow)) ? -EFAULT : 0;
}

static long ioctl_return(const void __user *argument)
{
	struct rackbus_return give;

	if (copy_from_user(&give, argument, sizeof(give)))
		return -EFAULT;
	if (give.flags & ~RACKBUS_RETURN_FORCE || give.reserved ||
	    give.timeout_ms > MAX_TIMEOUT_MS)
		return -EINVAL;
	return rackbus_return(give.handle, give.flags & RACKBUS_RETURN_FORCE,
			      give.timeout_ms ?: DEFAULT_TIMEOUT_MS);
}

static long ioctl_lost(const void __user *argument)
{
	struct rackbus_lost lost;

	if (copy_from_user(&lost, argument, sizeof(lost)))
		return -EFAULT;
	if (lost.reserved)
		return -EINVAL;
	return rackbus_lost(lost.handle);
}

static long ioctl_list(void __user *argument)
{
	u32 handles[RACKBUS_MAX_FUNCTIONS];
	struct rackbus_list list;
	u32 capacity;

	if (copy_from_user(&list, argument, sizeof(list)))
		return -EFAULT;
	if (list.total)
		return -EINVAL;
	capacity = min_t(u32, list.capacity, RACKBUS_MAX_FUNCTIONS);
	list.total = rackbus_list(handles, capacity);
	if (copy_to_user(u64_to_user_ptr(list.handles), handles,
			 min(capacity, list.total) * sizeof(*handles)) ||
	    copy_to_user(argument, &list, sizeof(list)))
		return -EFAULT;
	return 0;
}

static long ioctl_status(void __user *argument)
{
	struct rackbus_status status = {};
	long ret;

	if (copy_from_user(&status.handle, argument, sizeof(status.handle)))
		return -EFAULT;
	ret = rackbus_status(&status);
	if (ret)
		return ret;
	return copy_to_user(argument, &status, sizeof(status)) ? -EFAULT : 0;
}

static long rackbus_ioctl(struct file *file, unsigned int command,
			  unsigned long value)
{
	void __user *argument = (void __user *)value;

	switch (command) {
	case RACKBUS_VERSION_GET:
		return put_user(RACKBUS_API_VERSION, (u32 __user *)argument);
	case RACKBUS_BORROW:
		return ioctl_borrow(argument);
	case RACKBUS_RETURN:
		return ioctl_return(argument);
	case RACKBUS_LOST:
		return ioctl_lost(argument);
	case RACKBUS_LIST:
		return ioctl_list(argument);
	case RACKBUS_STATUS:
		return ioctl_status(argument);
	}
	return -ENOTTY;
}

static const struct file_operations rackbus_fops = {
	.owner = THIS_MODULE,
	.open = rackbus_open,
	.release = rackbus_closed,
	.read = rackbus_read,
	.poll = rackbus_poll,
	.unlocked_ioctl = rackbus_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice rackbus_device_node = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "rackbus",
	.fops = &rackbus_fops,
	.mode = 0600,
};

int rackbus_device_register(void)
{
	return misc_register(&rackbus_device_node);
}

void rackbus_device_unregister(void)
{
	misc_deregister(&rackbus_device_node);
}
