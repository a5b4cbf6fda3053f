"""Whether the wheel works with the oldest and the newest versions that its requirements allow."""
