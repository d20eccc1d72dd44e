"""The sample applications that the local Fleet can host, by ``env_key``."""

from actors.envs.local_fleet.application import Application
from actors.envs.local_fleet.apps.booking import Booking
from actors.envs.local_fleet.apps.mail import Mail
from actors.envs.local_fleet.apps.office import Office
from actors.envs.local_fleet.apps.tracker import Tracker

APPLICATIONS: dict[str, Application] = {
    application.env_key: application for application in (Tracker(), Booking(), Mail(), Office())
}
