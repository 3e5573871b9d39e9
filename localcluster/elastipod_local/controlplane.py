"""etcd, API server, controller manager, scheduler and, on request, Kueue of one cluster, as processes of the machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastipod_local import pki
from elastipod_local.addressing import API_PORT, ETCD_PEER_PORT, ETCD_PORT, Addressing
from elastipod_local.api import ApiServer
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import tail_of, wait_until
from elastipod_local.processes import ProcessId, spawn

READY_DEADLINE_S = 180
KUEUE = "kueue"
SERVING = ("etcd", "kube-apiserver")  # without these no call is answered
API_SERVER_FLAGS = "kube-apiserver.flags"  # what the cluster was brought up with, one a line
# An API server spends half of its processor time on collecting garbage as Go does it by default, every time its heap has doubled.
FEWER_COLLECTIONS = {"GOGC": "400", "GOMEMLIMIT": "1GiB"}  # from that heap on they are as frequent as they need to be


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """What the control plane of the cluster in `folder` is made of. All paths are absolute."""

    folder: Path
    name: str
    addressing: Addressing
    programs: Mapping[str, Path]

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def pki_dir(self) -> Path:
        return self.folder / "pki"

    @property
    def authority(self) -> pki.Authority:
        return pki.Authority(self.pki_dir, "ca")

    @property
    def api_server(self) -> ApiServer:
        """The API server, called as the administrator."""
        admin = (self.pki_dir / "admin.crt", self.pki_dir / "admin.key")
        return ApiServer(str(self.addressing.api_address), API_PORT, self.authority.certificate, *admin)

    def log(self, role: str) -> Path:
        return self.folder / "logs" / f"{role}.log"

    def create_pki(self) -> None:
        """Make both authorities, all certificates of the control plane, and the user's kubeconfig."""
        where = self.addressing
        self.authority.create()
        dns = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        self.authority.issue(
            "apiserver", "kube-apiserver", serves=[where.api_address, where.service_api_address, "localhost", *dns]
        )
        self.authority.issue("apiserver-kubelet-client", "elastipod-local:kubelet-client", group="system:masters")
        pki.write_signing_keys(self.pki_dir)
        etcd = pki.Authority(self.pki_dir, "etcd-ca")
        etcd.create()
        etcd.issue("etcd", "etcd", serves=[where.loopback])
        etcd.issue("apiserver-etcd-client", "kube-apiserver")
        self.create_client("admin", "elastipod-local:admin", self.kubeconfig, group="system:masters")
        for role in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
            self.create_client(role, f"system:{role}", self.pki_dir / f"{role}.kubeconfig")

    def create_client(self, file_name: str, user: str, kubeconfig: Path, group: str | None = None) -> None:
        """Issue a certificate for a user of the API server and write the kubeconfig that holds it."""
        issued = self.authority.issue(file_name, user, group=group)
        pki.write_kubeconfig(
            kubeconfig, server=self.addressing.api_url, authority=self.authority, client=issued, cluster=self.name
        )

    def start(self, role: str) -> ProcessId:
        """Start one role (a key of `commands()`, or KUEUE once it was installed)."""
        command = self.kueue_command() if role == KUEUE else self.commands()[role]
        return spawn(command, owner=self.folder, log=self.log(role), env=FEWER_COLLECTIONS)

    def commands(self) -> dict[str, list[str]]:
        """Give the command line of every role, in the order in which they are started."""
        return {
            "etcd": [str(self.programs["etcd"]), *self._etcd_flags()],
            "kube-apiserver": [str(self.programs["kube-apiserver"]), *self._api_server_flags()],
            "kube-controller-manager": [
                str(self.programs["kube-controller-manager"]),
                f"--kubeconfig={self.pki_dir}/kube-controller-manager.kubeconfig",
                f"--root-ca-file={self.authority.certificate}",
                f"--service-account-private-key-file={self.pki_dir}/sa.key",
                "--use-service-account-credentials=true",
                # It makes an account and a token for each of its controllers first: 4 s at 20 calls a second.
                "--kube-api-qps=200",
                "--kube-api-burst=400",
                "--leader-elect=false",
                "--secure-port=0",
            ],
            "kube-scheduler": [
                str(self.programs["kube-scheduler"]),
                f"--kubeconfig={self.pki_dir}/kube-scheduler.kubeconfig",
                "--leader-elect=false",
                "--secure-port=0",
            ],
        }

    @property
    def kueue_dir(self) -> Path:
        """Folder of Kueue's configuration, certificates and kubeconfig."""
        return self.folder / "kueue"

    def kueue_command(self) -> list[str]:
        """Give Kueue's command line, as its chart has it."""
        return [
            str(self.programs[KUEUE]),
            f"--config={self.kueue_dir}/config.yaml",
            f"--kubeconfig={self.kueue_dir}/kubeconfig",
            "--zap-log-level=2",
        ]

    def _etcd_flags(self) -> list[str]:
        client = f"https://{self.addressing.loopback}:{ETCD_PORT}"
        peer = f"https://{self.addressing.loopback}:{ETCD_PEER_PORT}"
        pair = (f"{self.pki_dir}/etcd.crt", f"{self.pki_dir}/etcd.key", f"{self.pki_dir}/etcd-ca.crt")
        return [
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            *(f"--{prefix}cert-file={pair[0]}" for prefix in ("", "peer-")),
            *(f"--{prefix}key-file={pair[1]}" for prefix in ("", "peer-")),
            *(f"--{prefix}trusted-ca-file={pair[2]}" for prefix in ("", "peer-")),
            "--client-cert-auth",
            "--peer-client-cert-auth",
            # The cluster lives no longer than its machine is up: waiting for the disk would buy nothing.
            "--unsafe-no-fsync",
            # As kubeadm sets it: else the API server sends no bookmarks of what never changes, and watches look dead.
            "--watch-progress-notify-interval=5s",
            "--log-level=warn",
        ]

    def _api_server_flags(self) -> list[str]:
        where, folder = self.addressing, self.pki_dir
        return [
            f"--etcd-servers=https://{where.loopback}:{ETCD_PORT}",
            f"--etcd-cafile={folder}/etcd-ca.crt",
            f"--etcd-certfile={folder}/apiserver-etcd-client.crt",
            f"--etcd-keyfile={folder}/apiserver-etcd-client.key",
            f"--bind-address={where.api_address}",
            f"--advertise-address={where.api_address}",
            f"--secure-port={API_PORT}",
            f"--tls-cert-file={folder}/apiserver.crt",
            f"--tls-private-key-file={folder}/apiserver.key",
            f"--client-ca-file={self.authority.certificate}",
            f"--kubelet-client-certificate={folder}/apiserver-kubelet-client.crt",
            f"--kubelet-client-key={folder}/apiserver-kubelet-client.key",
            f"--kubelet-certificate-authority={self.authority.certificate}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={folder}/sa.pub",
            f"--service-account-signing-key-file={folder}/sa.key",
            f"--service-cluster-ip-range={where.service_network}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            # The machine itself has no kube-proxy: webhooks behind Services are called at their pods' addresses.
            "--enable-aggregator-routing=true",
            # A loopback address is none that Endpoints may hold.
            *([] if where.block is not None else ["--endpoint-reconciler-type=none"]),
            "--allow-privileged=true",
            "--profiling=false",
            *(more.read_text().splitlines() if (more := self.folder / API_SERVER_FLAGS).exists() else ()),
        ]

    def wait_serving(self, running: Mapping[str, ProcessId]) -> None:
        """Return when the API server says it is ready.

        running: the processes by role. Raises LocalClusterError with the end of its log if the API server or etcd died.
        """
        server = self.api_server

        def ready() -> bool:
            self._require_alive({role: running[role] for role in SERVING}, "ended at its start")
            return server.answers_ok("/readyz")

        hint = f"log: {self.log('kube-apiserver')}"
        wait_until(ready, deadline_s=READY_DEADLINE_S, what="the API server to be ready", every_s=0.1, hint=hint)

    def wait_ready(self, running: Mapping[str, ProcessId]) -> None:
        """Return when the API server serves and pods can be created; raises as `wait_serving`, for all of `running`."""
        self.wait_serving(running)
        server = self.api_server

        def has_account() -> bool:
            if server.answers_ok("/api/v1/namespaces/default/serviceaccounts/default"):
                return True
            self._require_alive(running, "ended at its start")
            return False

        # The controller manager makes it; pods of the default namespace cannot be created before.
        wait_until(
            has_account,
            deadline_s=READY_DEADLINE_S,
            what="the default service account",
            every_s=0.1,
            hint=f"log: {self.log('kube-controller-manager')}",
        )

    def require_serving(self, running: Mapping[str, ProcessId]) -> None:
        """Raise LocalClusterError with the end of its log if the API server or etcd has ended: nothing is answered then."""
        self._require_alive({role: running[role] for role in SERVING}, "ended")

    def _require_alive(self, processes: Mapping[str, ProcessId], end: str) -> None:
        for role, process in processes.items():
            if not process.is_alive():
                raise LocalClusterError(f"{role} {end}: {tail_of(self.log(role))}")
