"""Devices that trainer, replicas and reward models use in turn (docs/placement.md).

::

    coordinator   grants.DeviceGrants.run      grants requests, asks holders back at a rung
    trainer       turns.trainer_turns          rank 0's turns with all devices
    rollout       turns.replica_turns          a replica's turns with its devices
    reward        lease.lease_of               the models' lease; ``penstock.services.reward.models.turns`` decides when they need it
    up            devices.gpus_of              the GPUs that a process sees

The settings are in ``penstock.shared.settings.placement``, the records in ``penstock.shared.bus.stores.replicas.device_leases``. Where
devices are not shared, every call returns at once.
"""
