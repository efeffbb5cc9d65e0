"""Keystores for Spark's TLS, made by keytool of the Java that runs Spark."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PASSWORD = "not a secret"


@dataclass(frozen=True)
class Keystores:
    """A key with its certificate, and the certificate alone, for Spark and for Python."""

    keys: Path
    trusted: Path
    certificate: Path

    @property
    def settings(self) -> dict[str, str]:
        """The settings that make Spark use them for everything it serves."""
        return {
            "spark.ssl.enabled": "true",
            "spark.ssl.rpc.enabled": "true",
            "spark.ssl.protocol": "TLSv1.3",
            "spark.ssl.keyStore": str(self.keys),
            "spark.ssl.keyStorePassword": PASSWORD,
            "spark.ssl.keyPassword": PASSWORD,
            "spark.ssl.trustStore": str(self.trusted),
            "spark.ssl.trustStorePassword": PASSWORD,
        }


def make_keystores(folder: Path) -> Keystores:
    """Make a key for this machine, and a truststore with its certificate."""
    keys, trusted, certificate = folder / "keys.jks", folder / "trusted.jks", folder / "certificate.pem"
    store = ("-alias", "spark", "-storetype", "JKS", "-storepass", PASSWORD)
    key = ("-keyalg", "RSA", "-keysize", "2048", "-validity", "2", "-keypass", PASSWORD)
    names = ("-dname", "CN=localhost", "-ext", "san=ip:127.0.0.1,dns:localhost")
    _keytool("-genkeypair", *store, "-keystore", keys, *key, *names)
    _keytool("-exportcert", *store, "-keystore", keys, "-rfc", "-file", certificate)
    _keytool("-importcert", *store, "-keystore", trusted, "-file", certificate, "-noprompt")
    return Keystores(keys, trusted, certificate)


def _keytool(*arguments: str | Path) -> None:
    home = os.environ.get("JAVA_HOME")
    keytool = str(Path(home) / "bin" / "keytool") if home else shutil.which("keytool")
    assert keytool is not None, "keytool comes with Java"
    done = subprocess.run(
        [keytool, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
