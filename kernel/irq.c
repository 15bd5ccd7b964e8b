// SPDX-License-Identifier: GPL-2.0
/*
 * Interrupts of a borrowed function.  Its device signals one by a write that
 * arrives in this host as one of the NTB: so each of the function's vectors has
 * one of the NTB's own, with that one's message (and its affinity, and entry
 * for interrupt remapping), only that the address is the one by which the
 * device reaches this host.  What arrives at the NTB's vector is handed on.
 *
 * An entry of the device's table is written when the kernel asks for that, with
 * the lock of the function's interrupt, and when the NTB's vector moves, with
 * that of the NTB's: whoever touches an entry has msi_lock, and writes what the
 * NTB's message is by then.  Otherwise the device could signal by half a message.
 * But for a reset: the PCI core writes all entries again after it, by itself,
 * and a vector that moves just then may leave such an entry where interrupts
 * are not remapped.
 */
#include <linux/interrupt.h>
#include <linux/irq.h>
#include <linux/irqdomain.h>
#include <linux/msi.h>

#include "compat.h"
#include "internal.h"
#if RACKBUS_MSI_PARENT
#include <linux/irqchip/irq-msi-lib.h>
#endif

static void translate(struct rackbus_function *fn, struct msi_msg *msg)
{
	u64 base = READ_ONCE(fn->isolated) ? fn->offer.mapped_msi_base :
					     fn->offer.msi_base;
	u64 to = base + (msg->address_lo & (RACKBUS_MSI_SIZE - 1));

	if (msg->address_hi ||
	    (msg->address_lo & ~(RACKBUS_MSI_SIZE - 1)) != RACKBUS_MSI_ADDRESS)
		pci_warn_once(fn->ntb->pdev,
			      "interrupt message for %#x:%08x, which is no local APIC's\n",
			      msg->address_hi, msg->address_lo);
	msg->address_lo = lower_32_bits(to);
	msg->address_hi = upper_32_bits(to);
}

static struct rackbus_vector *vector_of(struct irq_data *data)
{
	struct rackbus_function *fn = irq_data_get_irq_chip_data(data);

	return &fn->vector[data->hwirq];
}

/* With msi_lock. */
static void compose(struct rackbus_vector *vector, struct msi_msg *msg)
{
	*msg = vector->message;
	translate(vector->function, msg);
}

static void rackbus_compose(struct irq_data *data, struct msi_msg *msg)
{
	struct rackbus_vector *vector = vector_of(data);
	unsigned long flags;

	raw_spin_lock_irqsave(&vector->function->msi_lock, flags);
	compose(vector, msg);
	raw_spin_unlock_irqrestore(&vector->function->msi_lock, flags);
}

/* The NTB's vector may have moved since the message was composed. */
static void rackbus_write(struct irq_data *data, struct msi_msg *msg)
{
	struct rackbus_vector *vector = vector_of(data);
	struct msi_msg newest = *msg;
	unsigned long flags;

	raw_spin_lock_irqsave(&vector->function->msi_lock, flags);
	/* An interrupt that ends has an empty message, which stays empty. */
	if (msg->address_lo || msg->address_hi)
		compose(vector, &newest);
	pci_write_msi_msg(data->irq, &newest);
	raw_spin_unlock_irqrestore(&vector->function->msi_lock, flags);
}

static void rackbus_mask(struct irq_data *data)
{
	struct rackbus_function *fn = irq_data_get_irq_chip_data(data);
	unsigned long flags;

	raw_spin_lock_irqsave(&fn->msi_lock, flags);
	pci_msi_mask_irq(data);
	raw_spin_unlock_irqrestore(&fn->msi_lock, flags);
}

static void rackbus_unmask(struct irq_data *data)
{
	struct rackbus_function *fn = irq_data_get_irq_chip_data(data);
	unsigned long flags;

	raw_spin_lock_irqsave(&fn->msi_lock, flags);
	pci_msi_unmask_irq(data);
	raw_spin_unlock_irqrestore(&fn->msi_lock, flags);
}

/*
 * The NTB's vector moves with the function's interrupt, a moment later: here the
 * kernel has locks that it takes for the other one, too (before Linux 6.12 it
 * would wait for itself).  When a processor goes away, the kernel moves the
 * NTB's vectors by itself.
 */
static int rackbus_set_affinity(struct irq_data *data,
				const struct cpumask *mask, bool force)
{
	struct rackbus_vector *vector = vector_of(data);
	struct rackbus_function *fn = vector->function;
	unsigned long flags;

	raw_spin_lock_irqsave(&fn->msi_lock, flags);
	cpumask_copy(vector->wanted, mask);
	vector->moves = true;
	raw_spin_unlock_irqrestore(&fn->msi_lock, flags);
	irq_data_update_effective_affinity(data, mask);
	queue_work(rackbus_watches, &fn->moves);
	return IRQ_SET_MASK_OK_DONE;
}

static void move_vectors(struct work_struct *work)
{
	struct rackbus_function *fn =
		container_of(work, struct rackbus_function, moves);
	struct rackbus_vector *vector;
	unsigned long flags;
	unsigned int k;
	bool moves;

	for (k = 0; k < fn->vectors; k++) {
		vector = &fn->vector[k];
		raw_spin_lock_irqsave(&fn->msi_lock, flags);
		moves = vector->moves;
		vector->moves = false;
		cpumask_copy(vector->moving, vector->wanted);
		raw_spin_unlock_irqrestore(&fn->msi_lock, flags);
		/* It fails where no processor of these is there any more. */
		if (moves)
			irq_set_affinity(vector->ntb_irq, vector->moving);
	}
}

/* An edge: the message is all there is, so nothing has to be said. */
static void rackbus_ack(struct irq_data *data)
{
}

static struct irq_chip rackbus_irq_chip = {
	.name = "rackbus",
	.irq_compose_msi_msg = rackbus_compose,
	.irq_set_affinity = rackbus_set_affinity,
	.irq_ack = rackbus_ack,
#if !RACKBUS_MSI_PARENT
	.irq_mask = rackbus_mask,
	.irq_unmask = rackbus_unmask,
	.irq_write_msi_msg = rackbus_write,
#endif
	.flags = IRQCHIP_SKIP_SET_WAKE,
};

/* What arrived at one of the NTB's vectors is the function's. */
static irqreturn_t rackbus_interrupt(int irq, void *data)
{
	struct rackbus_vector *vector = data;
	struct rackbus_function *fn = vector->function;

	if (!READ_ONCE(vector->irq)) {
		atomic64_inc(&fn->interrupts_stray);
		return IRQ_HANDLED;
	}
	atomic64_inc(&vector->count);
	generic_handle_domain_irq(fn->irq_domain, vector - fn->vector);
	return IRQ_HANDLED;
}

/*
 * The NTB's vector has another message (it moved to another processor): so has
 * the function's.  Called with the lock of the NTB's interrupt.
 */
static void rackbus_moved(struct msi_desc *desc, void *data)
{
	struct rackbus_vector *vector = data;
	struct rackbus_function *fn = vector->function;
	struct msi_msg msg;
	unsigned long flags;

	raw_spin_lock_irqsave(&fn->msi_lock, flags);
	vector->message = desc->msg;
	if (vector->irq && irq_get_msi_desc(vector->irq)) {
		compose(vector, &msg);
		pci_write_msi_msg(vector->irq, &msg);
	}
	raw_spin_unlock_irqrestore(&fn->msi_lock, flags);
}

static void set_vector(struct rackbus_function *fn, unsigned int k,
		       unsigned int irq)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&fn->msi_lock, flags);
	WRITE_ONCE(fn->vector[k].irq, irq);
	raw_spin_unlock_irqrestore(&fn->msi_lock, flags);
}

static int rackbus_irq_set_up(struct irq_domain *domain,
			      struct rackbus_function *fn, unsigned int irq,
			      irq_hw_number_t k)
{
	if (k >= fn->vectors)
		return -ENOSPC;
	irq_domain_set_info(domain, irq, k, &rackbus_irq_chip, fn,
			    handle_edge_irq, fn, "edge");
	rackbus_move_at_once(irq);
	set_vector(fn, k, irq);
	return 0;
}

#if RACKBUS_MSI_PARENT
static void rackbus_domain_free(struct irq_domain *domain, unsigned int irq,
				unsigned int count)
{
	struct irq_data *data;
	unsigned int i;

	for (i = 0; i < count; i++) {
		data = irq_domain_get_irq_data(domain, irq + i);
		if (!data || !data->chip_data)
			continue;
		set_vector(domain->host_data, data->hwirq, 0);
		irq_domain_reset_irq_data(data);
	}
}

static int rackbus_domain_alloc(struct irq_domain *domain, unsigned int irq,
				unsigned int count, void *arg)
{
	msi_alloc_info_t *info = arg;
	unsigned int i;
	int ret;

	for (i = 0; i < count; i++) {
		ret = rackbus_irq_set_up(domain, domain->host_data, irq + i,
					 info->desc->msi_index + i);
		if (ret) {
			rackbus_domain_free(domain, irq, i);
			return ret;
		}
	}
	return 0;
}

static const struct irq_domain_ops rackbus_domain_ops = {
	.alloc = rackbus_domain_alloc,
	.free = rackbus_domain_free,
};

/*
 * The chip of a device's own domain, which is above this one.  It starts and
 * stops an interrupt by unmasking and masking it, unless it has more to do.
 */
static bool rackbus_init_dev_msi_info(struct device *dev,
				      struct irq_domain *domain,
				      struct irq_domain *real_parent,
				      struct msi_domain_info *info)
{
	if (!msi_lib_init_dev_msi_info(dev, domain, real_parent, info))
		return false;
	info->chip_data = domain->host_data;
	info->chip->irq_startup = NULL;
	info->chip->irq_shutdown = NULL;
	info->chip->irq_mask = rackbus_mask;
	info->chip->irq_unmask = rackbus_unmask;
	info->chip->irq_write_msi_msg = rackbus_write;
	return true;
}

static const struct msi_parent_ops rackbus_parent_ops = {
	.required_flags = MSI_FLAG_USE_DEF_DOM_OPS | MSI_FLAG_USE_DEF_CHIP_OPS,
	.supported_flags = MSI_GENERIC_FLAGS_MASK | MSI_FLAG_PCI_MSIX,
	.bus_select_token = DOMAIN_BUS_PCI_MSI,
	.bus_select_mask = MATCH_PCI_MSI,
	.chip_flags = MSI_CHIP_FLAG_SET_ACK,
	.prefix = "rackbus-",
	.init_dev_msi_info = rackbus_init_dev_msi_info,
};

static int make_domain(struct rackbus_function *fn)
{
	struct irq_domain_info info = {
		.fwnode = fn->fwnode,
		.ops = &rackbus_domain_ops,
		.host_data = fn,
		.size = fn->vectors,
	};

	fn->irq_domain = msi_create_parent_irq_domain(&info,
						      &rackbus_parent_ops);
	return fn->irq_domain ? 0 : -ENOMEM;
}
#else
static irq_hw_number_t rackbus_get_hwirq(struct msi_domain_info *info,
					 msi_alloc_info_t *arg)
{
	return arg->desc->msi_index;
}

static void rackbus_set_desc(msi_alloc_info_t *arg, struct msi_desc *desc)
{
	arg->desc = desc;
}

static int rackbus_prepare(struct irq_domain *domain, struct device *dev,
			   int count, msi_alloc_info_t *arg)
{
	memset(arg, 0, sizeof(*arg));
	return 0;
}

static int rackbus_msi_init(struct irq_domain *domain,
			    struct msi_domain_info *info, unsigned int irq,
			    irq_hw_number_t k, msi_alloc_info_t *arg)
{
	return rackbus_irq_set_up(domain, info->data, irq, k);
}

static void rackbus_msi_free(struct irq_domain *domain,
			     struct msi_domain_info *info, unsigned int irq)
{
	struct irq_data *data = irq_domain_get_irq_data(domain, irq);

	if (data)
		set_vector(info->data, data->hwirq, 0);
}

static struct msi_domain_ops rackbus_msi_ops = {
	.get_hwirq = rackbus_get_hwirq,
	.set_desc = rackbus_set_desc,
	.msi_prepare = rackbus_prepare,
	.msi_init = rackbus_msi_init,
	.msi_free = rackbus_msi_free,
};

static int make_domain(struct rackbus_function *fn)
{
	struct msi_domain_info *info = kzalloc(sizeof(*info), GFP_KERNEL);

	if (!info)
		return -ENOMEM;
	info->chip = &rackbus_irq_chip;
	info->ops = &rackbus_msi_ops;
	info->flags = MSI_FLAG_USE_DEF_DOM_OPS | MSI_FLAG_USE_DEF_CHIP_OPS |
		      MSI_FLAG_PCI_MSIX;
	info->data = fn;
	fn->irq_domain = pci_msi_create_irq_domain(fn->fwnode, info, NULL);
	if (!fn->irq_domain) {
		kfree(info);
		return -ENOMEM;
	}
	fn->msi_info = info;
	return 0;
}
#endif

static void remove_vector(struct rackbus_vector *vector)
{
	/*
	 * Who writes the message looks at the pointer and then calls
	 * it: it is changed when nobody does, as the interrupt is off.
	 */
	free_irq(vector->ntb_irq, vector);
	irq_get_msi_desc(vector->ntb_irq)->write_msi_msg = NULL;
	free_cpumask_var(vector->wanted);
	free_cpumask_var(vector->moving);
}

static int take_vector(struct rackbus_function *fn,
		       struct rackbus_vector *vector)
{
	struct msi_desc *desc;
	int ret = -ENOMEM;

	vector->function = fn;
	vector->ntb_irq = pci_irq_vector(fn->ntb->pdev, vector->index);
	if (!zalloc_cpumask_var(&vector->wanted, GFP_KERNEL))
		return ret;
	if (!zalloc_cpumask_var(&vector->moving, GFP_KERNEL))
		goto free_wanted;
	/* As long as the interrupt is off, its message stays as it is. */
	desc = irq_get_msi_desc(vector->ntb_irq);
	vector->message = desc->msg;
	desc->write_msi_msg_data = vector;
	desc->write_msi_msg = rackbus_moved;
	ret = request_irq(vector->ntb_irq, rackbus_interrupt, IRQF_NO_THREAD,
			  "rackbus", vector);
	if (!ret)
		return 0;
	desc->write_msi_msg = NULL;
	free_cpumask_var(vector->moving);
free_wanted:
	free_cpumask_var(vector->wanted);
	return ret;
}

static int take_vectors(struct rackbus_function *fn)
{
	unsigned int k;
	int ret;

	for (k = 0; k < fn->vectors; k++) {
		ret = take_vector(fn, &fn->vector[k]);
		if (!ret)
			continue;
		while (k--)
			remove_vector(&fn->vector[k]);
		return ret;
	}
	return 0;
}

int rackbus_irq_create(struct rackbus_function *fn)
{
	int ret;

	if (!fn->vectors)
		return 0;
	raw_spin_lock_init(&fn->msi_lock);
	INIT_WORK(&fn->moves, move_vectors);
	fn->fwnode = irq_domain_alloc_named_id_fwnode("rackbus", fn->handle);
	if (!fn->fwnode)
		return -ENOMEM;
	ret = make_domain(fn);
	if (ret)
		goto free_fwnode;
	ret = take_vectors(fn);
	if (ret)
		goto remove_domain;
	return 0;

remove_domain:
	irq_domain_remove(fn->irq_domain);
	kfree(fn->msi_info);
free_fwnode:
	irq_domain_free_fwnode(fn->fwnode);
	return ret;
}

/* No device of the function is left, and so none of its interrupts. */
void rackbus_irq_remove(struct rackbus_function *fn)
{
	unsigned int k;

	if (!fn->vectors)
		return;
	cancel_work_sync(&fn->moves);
	for (k = 0; k < fn->vectors; k++)
		remove_vector(&fn->vector[k]);
	irq_domain_remove(fn->irq_domain);
	kfree(fn->msi_info);
	irq_domain_free_fwnode(fn->fwnode);
}
