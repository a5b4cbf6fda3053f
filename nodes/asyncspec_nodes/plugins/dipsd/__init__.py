"""``asyncspec plan dipsd``: DiP-SD's plans for described machines and for a running cluster."""
