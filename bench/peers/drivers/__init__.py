"""Programs that run inside the other engines' environments and take jobs on stdin; they import no Quintet but one."""
