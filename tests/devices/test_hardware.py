import logging

import pytest

from haiku_template.devices import DeviceManager, hardware


def add_pci_device(root, vendor, kind):
    device = root / "sys/bus/pci/devices" / f"0000:0{vendor[-1]}:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")


@pytest.mark.parametrize("node", hardware.NVIDIA_NODES)
def test_device_nodes_are_seen(tmp_path, node):
    assert hardware.nvidia_nodes(tmp_path) == []
    (tmp_path / "dev").mkdir()
    (tmp_path / node).touch()
    assert hardware.nvidia_nodes(tmp_path) == ["/" + node]


def test_only_nvidia_display_controllers_on_the_bus_count(tmp_path):
    assert not hardware.nvidia_on_pci(tmp_path)
    add_pci_device(tmp_path, "0x1002", "0x030000")  # A card of another maker.
    add_pci_device(tmp_path, "0x10df", "0x020000")
    assert not hardware.nvidia_on_pci(tmp_path)
    add_pci_device(tmp_path, "0x10de", "0x030200")
    assert hardware.nvidia_on_pci(tmp_path)


def test_the_first_broken_link_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "cuda_plugins", lambda: [])
    assert "no NVIDIA card" in hardware.why_no_gpu(tmp_path)
    add_pci_device(tmp_path, "0x10de", "0x030000")
    assert "driver is not loaded" in hardware.why_no_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert "installed without CUDA" in hardware.why_no_gpu(tmp_path)
    monkeypatch.setattr(hardware, "cuda_plugins", lambda: ["jax-cuda13-plugin 1"])
    assert "could not start it" in hardware.why_no_gpu(tmp_path)


def test_auto_on_the_cpu_beside_a_card_is_loud(monkeypatch, caplog):
    monkeypatch.setattr(hardware, "nvidia_nodes", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(hardware, "why_no_gpu", lambda: "the reason")
    with caplog.at_level(logging.WARNING):
        DeviceManager.create("auto")
    assert "CARD IS NOT USED" in caplog.text and "the reason" in caplog.text
