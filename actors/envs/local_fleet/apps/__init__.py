"""The sample applications that the local Fleet can host, by ``env_key``."""

from actors.envs.local_fleet.application import Application
from actors.envs.local_fleet.apps.tracker import Tracker

APPLICATIONS: dict[str, Application] = {application.env_key: application for application in (Tracker(),)}
