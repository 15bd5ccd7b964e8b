/*
 * A boot sector, for a VM that boots from a borrowed drive by its BIOS: it says so by the serial port, prints the text in the
 * drive's second sector, and then reads the drive on and on, with a dot for each 64 KiB.
 */
	.code16
	.globl	_start
_start:
	xorw	%ax, %ax
	movw	%ax, %ds
	movw	%ax, %ss
	movw	$0x7c00, %sp
	movb	%dl, drive
	movw	$begun, %si
	call	say
	call	fetch
	movw	$0x8000, %si
	call	say
	movw	$128, count
again:	call	fetch
	movw	$dot, %si
	call	say
	jmp	again

/* Reads what the packet says: INT 13h, extended read. */
fetch:	movb	$0x42, %ah
	movb	drive, %dl
	movw	$packet, %si
	int	$0x13
	jnc	done
	movw	$failed, %si
	call	say
stop:	hlt
	jmp	stop

/* Prints the text at SI. */
say:	lodsb
	testb	%al, %al
	jz	done
	movb	%al, %cl
1:	movw	$0x3fd, %dx
	inb	%dx, %al
	testb	$0x20, %al
	jz	1b
	movb	%cl, %al
	movw	$0x3f8, %dx
	outb	%al, %dx
	jmp	say
done:	ret

begun:	.asciz	"boot sector runs\r\n"
failed:	.asciz	"read failed\r\n"
dot:	.asciz	"."
drive:	.byte	0
	.balign	4
packet:	.byte	16, 0
count:	.word	1		/* sectors, to 0:8000, from the second one */
	.word	0x8000, 0
	.quad	1
	.org	510
	.word	0xaa55
	.org	512
	.asciz	"the second sector was read\r\n"
	.org	1024
