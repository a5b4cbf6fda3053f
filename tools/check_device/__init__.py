"""What can only be checked on the machine that has the device."""
