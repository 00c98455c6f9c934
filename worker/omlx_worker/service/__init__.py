"""The worker as a service of the system: launchd's on macOS, systemd's on Linux."""
